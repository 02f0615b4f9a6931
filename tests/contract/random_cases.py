"""Random scenarios with the seed's answers as expectations: cases that no file holds.

In:  a random source and what may occur.
Out: cases, each field expected as the model of the seed answers it.
Law: steps stop where the seed raises, as in the files.
"""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from contract import range_models
from contract.case import Case
from contract.labels import shortened
from contract.seed_manager import SeedManager
from contract.seed_model import NoFreeBlock

FIELDS = (
    "prepopulated",
    "block_ids",
    "free_blocks",
    "is_primary",
    "prev_block_id",
    "priority",
    "has_refs",
    "block_ids_per_window",
)


@dataclass(frozen=True, slots=True)
class Flavour:
    """What may occur in the scenarios."""

    host: bool = False
    sliding: bool = False
    retention: bool = False
    scopes: bool = False
    events: bool = False
    inspects: bool = False
    ranges: bool = False


FLAVOURS = {
    "plain": Flavour(),
    "wishes": Flavour(retention=True, scopes=True, inspects=True),
    "tiers": Flavour(host=True),
    "windows": Flavour(sliding=True),
    "events": Flavour(events=True, host=True),
    "ranges": Flavour(ranges=True),
    "ranges of windows": Flavour(ranges=True, sliding=True),
}


def random_case(number: int, flavour: Flavour) -> Case:
    """The scenario of this number, always the same."""
    return _Scenario(Random(number), flavour).case(f"random-{number}")


class _Scenario:
    def __init__(self, random: Random, flavour: Flavour) -> None:
        self._random, self._flavour = random, flavour
        self._config = self._a_config()
        self._seed = SeedManager(self._config)
        self._steps: list[dict[str, Any]] = []
        self._lengths: dict[int, int] = {}
        self._prompts: dict[int, list[int]] = {}
        self._num_requests = 0

    def case(self, name: str) -> Case:
        for _ in range(self._random.randint(3, 14)):
            if not self._do(self._a_step()):
                break
        content = {"name": name, "kind": "scenario", "config": self._config, "steps": self._steps}
        return Case("random", content)

    def _do(self, step: dict[str, Any]) -> bool:
        try:
            answer = self._answer(json.loads(json.dumps(step)))
        except NoFreeBlock:
            self._steps.append(step | {"expect_error": True})
            return False
        except RecursionError:  # a cycle in the tree (D1): nothing can be expected of the seed any more
            return False
        expect = {field: answer[field] for field in FIELDS if field in answer}
        if "events" in answer:
            expect["events"] = shortened(answer["events"])
        self._steps.append(step | {"expect": expect})
        return True

    def _answer(self, step: dict[str, Any]) -> dict[str, Any]:
        if step["op"] in range_models.SEED:
            return range_models.SEED[step["op"]](self._seed, step)
        return self._seed.call(step) or {}

    def _a_step(self) -> dict[str, Any]:
        dice = self._random.random()
        if dice < 0.45 or not self._lengths:
            return self._an_addition()
        if self._flavour.events and dice < 0.55:
            return {"op": "get_events"}
        if self._flavour.inspects and dice < 0.55:
            return {"op": "inspect_block", "block_id": self._random.randrange(4)}
        if self._flavour.ranges and dice < 0.62:
            return self._a_range()
        request_id = self._random.choice(list(self._lengths))
        if dice < 0.7 and self._lengths[request_id] < 27:
            return self._a_decode(request_id)
        if dice < 0.8:
            return {"op": "store_context_blocks", "request_id": request_id}
        del self._lengths[request_id]
        return {"op": "remove_sequence", "request_id": request_id, "with_request": self._random.random() < 0.9}

    def _an_addition(self) -> dict[str, Any]:
        random, length = self._random, self._random.randint(1, 14)
        start = random.choice([0, 0, 0, 50])
        tokens = list(range(start, start + length))
        if random.random() < 0.3:
            cut = random.randrange(length)
            tokens[cut:] = [random.choice([90, 91]) for _ in tokens[cut:]]
        request: dict[str, Any] = {"tokens": tokens, "max_new_tokens": 8}
        if self._flavour.scopes and random.random() < 0.2:
            request[random.choice(["lora_id", "salt"])] = random.choice([0, 1])
        if self._flavour.retention and random.random() < 0.3:
            first = {
                "start": random.choice([0, 0, 3]),
                "end": random.choice([None, 9]),
                "priority": random.choice([10, 80]),
            }
            request["retention"] = {"ranges": [first], "decode_priority": random.choice([35, 60])}
        request_id, self._num_requests = self._num_requests, self._num_requests + 1
        self._lengths[request_id], self._prompts[request_id] = length, tokens
        step = {"op": "add_sequence", "request_id": request_id, "request": request}
        return step | {"input_length": length, "beam_width": 1}

    def _a_range(self) -> dict[str, Any]:
        random = self._random
        request_id = random.choice(list(self._lengths))
        if random.random() < 0.4:
            step = {"op": "block_range_for_receiving", "request_id": request_id}
            return step | {"src_enable_block_reuse": random.random() < 0.7, "recv_side_has_cp": random.random() < 0.2}
        # Of a request that has ended the seed finds blocks only by a key, in the one window.
        finds = self._config["enable_block_reuse"] and len(self._config["blocks_per_window"]) == 1
        if finds and random.random() < 0.3:
            request_id = random.choice(list(self._prompts))
        is_there = request_id in self._lengths
        prompt = self._prompts[request_id]
        key = prompt[: random.randint(1, len(prompt))] if not is_there or random.random() < 0.7 else None
        step = {"op": "block_range_for_sending", "request_id": request_id, "last_block_key_tokens": key}
        step["index_from_end"] = random.randrange(-(-len(key) // 4)) if key else 0
        return step | {"recv_side_has_cp": is_there and random.random() < 0.2}

    def _a_decode(self, request_id: int) -> dict[str, Any]:
        length, count = self._lengths[request_id], self._random.randint(1, 3)
        self._lengths[request_id] += count
        tokens = [self._random.choice([length + at, 7]) for at in range(count)]
        return {"op": "decode", "request_id": request_id, "tokens": tokens}

    def _a_config(self) -> dict[str, Any]:
        random = self._random
        num_host = random.choice([0, 2, 4]) if self._flavour.host else 0
        windows = {"32": [random.choice([4, 6, 8]), num_host]}
        if self._flavour.sliding:
            windows = {"8": [random.choice([6, 8]), 0]} | ({"32": [8, 0]} if random.random() < 0.5 else {})
        return {
            "target": "kv_cache_manager",
            "num_layers": 2,
            "num_kv_heads": 1,
            "size_per_head": 16,
            "tokens_per_block": 4,
            "max_num_sequences": 8,
            "max_beam_width": 1,
            "dtype": "half",
            "sink_token_length": 0,
            "enable_block_reuse": not self._flavour.ranges or random.random() < 0.8,
            "onboard_blocks": True,
            "cache_type": "self",
            "secondary_offload_min_priority": None,
            "event_buffer_max_size": 64 if self._flavour.events else None,
            "enable_partial_reuse": random.random() < 0.7,
            "copy_on_partial_reuse": random.random() < 0.7,
            "max_attention_window_vec": [int(window) for window in windows],
            "max_sequence_length": 32,
            "blocks_per_window": windows,
        }
