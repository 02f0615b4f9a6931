"""Random scenarios with the seed's answers as expectations: cases that no file holds.

In:  a random source and what may occur.
Out: cases, each field expected as the model of the seed answers it.
Law: steps stop where the seed raises, as in the files.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from contract import range_models
from contract.case import Case
from contract.flavours import USUAL, Flavour
from contract.labels import shortened
from contract.seed_manager import SeedManager
from contract.seed_model import NoFreeBlock, TooMuchFound

Step = dict[str, Any]


def random_case(number: int, flavour: Flavour) -> Case:
    """The scenario of this number, always the same."""
    return _Scenario(Random(number), flavour).case(f"random-{number}")


class _Scenario:
    def __init__(self, random: Random, flavour: Flavour) -> None:
        self._random, self._flavour = random, flavour
        self._config = flavour.config(random)
        self._seed = SeedManager(self._config)
        self._steps: list[Step] = []
        self._lengths: dict[int, int] = {}
        self._prompts: dict[int, list[int]] = {}
        self._waiting: list[int] = []
        self._pinned: list[list[int]] = []
        self._num_requests = 0

    def case(self, name: str) -> Case:
        for _ in range(self._random.randint(4, 24)):
            if not all(self._do(step) for step in self._some_steps()):
                break
        content = {"name": name, "kind": "scenario", "config": self._config, "steps": self._steps}
        return Case("random", content)

    def _do(self, step: Step) -> bool:
        try:
            answer = self._answer(json.loads(json.dumps(step)))
        except TooMuchFound:  # we trim what a connector offers; no defect of the seed, no case of ours
            return False
        except NoFreeBlock:
            self._steps.append(step | {"expect_error": True})
            return False
        except RecursionError:  # a cycle in the tree (D1): nothing can be expected of the seed any more
            return False
        if "events" in answer:
            answer["events"] = shortened(answer["events"])
        if answer.get("pinned_block_ids"):
            self._pinned.append(list(answer["pinned_block_ids"]))
        self._steps.append(step | {"expect": answer})
        return True

    def _answer(self, step: Step) -> dict[str, Any]:
        if step["op"] in range_models.SEED:
            return range_models.SEED[step["op"]](self._seed, step)
        return self._seed.call(step) or {}

    def _some_steps(self) -> list[Step]:
        kind = self._random.choice(USUAL + self._flavour.steps)
        if kind == "add" and self._lengths and self._num_free() < 4 and self._random.random() < 0.85:
            kind = "remove"
        if kind in ("add", "find", "find_new", "prepare") or not self._lengths:
            return [self._an_addition()] if kind not in FREE else FREE[kind](self)
        if kind in FREE:
            return FREE[kind](self)
        request_id = self._random.choice(list(self._lengths))
        found = HELD[kind](self, request_id)
        return found if isinstance(found, list) else [found]

    def _num_free(self) -> int:
        return min(window.num_free() for window in self._seed.windows)

    # Steps that need no sequence.

    def _an_addition(self) -> Step:
        random = self._random
        if self._waiting and random.random() < 0.6:
            request_id = self._waiting.pop()
            content = self._seed.requests[request_id].content or {}
            step: Step = {"op": "add_sequence", "request_id": request_id, "use_existing_request": True}
            length = len(content["tokens"])
        else:
            request_id, self._num_requests = self._num_requests, self._num_requests + 1
            content = self._a_request()
            length = content.get("encoder_output_len", len(content["tokens"]))
            step = {"op": "add_sequence", "request_id": request_id, "request": content}
            if self._flavour.setups and random.random() < 0.15:
                del step["request"]
        self._lengths[request_id], self._prompts[request_id] = length, content["tokens"]
        width = self._config["max_beam_width"]
        return step | {"input_length": length, "beam_width": random.randint(1, width)}

    def _a_preparation(self) -> list[Step]:
        request_id, self._num_requests = self._num_requests, self._num_requests + 1
        self._waiting.append(request_id)
        return [{"op": "make_request", "request_id": request_id, "request": self._a_request(), "beam_width": 1}]

    def _some_tokens(self) -> list[int]:
        random = self._random
        length = random.randint(1, 22 if self._flavour.sliding and random.random() < 0.3 else 14)
        start = random.choice([0, 0, 0, 50])
        tokens = list(range(start, start + length))
        if random.random() < 0.3:
            cut = random.randrange(length)
            tokens[cut:] = [random.choice([90, 91]) for _ in tokens[cut:]]
        return tokens

    def _a_request(self) -> dict[str, Any]:
        random, flavour = self._random, self._flavour
        tokens = self._some_tokens()
        request: dict[str, Any] = {"tokens": tokens, "max_new_tokens": random.choice([8, 8, 1, 16])}
        if flavour.cross:
            request |= {"tokens": [1, 2, 3], "encoder_output_len": len(tokens)}
        request |= self._a_scope(tokens)
        if "needed" in flavour.steps and random.random() < 0.3:
            request["draft_len"] = random.randint(1, 3)
        if flavour.setups and random.random() < 0.1:
            request["is_dummy"] = True
        if flavour.retention and random.random() < 0.5:
            request["retention"] = self._a_retention()
        return request

    def _a_scope(self, tokens: list[int]) -> dict[str, Any]:
        random = self._random
        scope: dict[str, Any] = {}
        if self._flavour.scopes and random.random() < 0.2:
            scope[random.choice(["lora_id", "salt"])] = random.choice([0, 1])
        if self._flavour.items and random.random() < 0.2:
            scope["extra_ids"] = [random.choice([0, 0, 5]) for _ in tokens]
        elif self._flavour.items and random.random() < 0.5:
            position = random.randrange(len(tokens))
            image = random.choice([1, 2])
            items: dict[str, Any] = {"hashes": [[image] * 8], "positions": [position], "lengths": [3 * image]}
            if random.random() < 0.05:
                items["positions"] = [position, position]
            scope["multimodal"] = items
        return scope

    def _a_retention(self) -> dict[str, Any]:
        random = self._random
        first: dict[str, Any] = {
            "start": random.choice([0, 0, 3]),
            "end": random.choice([None, 9]),
            "priority": random.choice([10, 80]),
        }
        retention: dict[str, Any] = {"ranges": [first], "decode_priority": random.choice([35, 60])}
        if self._flavour.durations:
            first["duration_ms"] = random.choice([5, 20])
            if random.random() < 0.3:
                retention["decode_duration_ms"] = 10
        return retention

    def _a_search(self, op: str) -> list[Step]:
        tokens = self._some_tokens()
        return [{"op": op, "tokens": tokens} | self._a_scope(tokens)]

    def _an_unpinning(self) -> list[Step]:
        if not self._pinned:
            return []
        ids = self._pinned[self._random.randrange(len(self._pinned))]
        dice = self._random.random()
        count = len(ids) if dice < 0.5 else self._random.randint(1, len(ids))
        given = ids[-count:] if dice < 0.8 else self._random.sample(ids, count)
        for block_id in given:
            ids.remove(block_id)
        self._pinned = [one for one in self._pinned if one]
        return [{"op": "unpin_blocks_by_id", "block_ids": given}]

    def _of_a_block(self, op: str, **more: Any) -> list[Step]:
        num_blocks = sum(next(iter(self._config["blocks_per_window"].values())))
        return [{"op": op, "block_id": self._random.randrange(num_blocks)} | more]

    def _a_priority(self) -> list[Step]:
        blocks = [block.block_id for block in self._seed.windows[0].blocks if block.in_tree or block.refs]
        priority = self._random.choice([5, 35, 80])
        step = {"op": "set_block_priority", "block_id": self._random.choice(blocks or [0]), "priority": priority}
        return [step] if blocks else []

    # Steps of a sequence.

    def _a_decode(self, request_id: int) -> list[Step]:
        length, count = self._lengths[request_id], self._random.randint(1, 3)
        if length >= 27 or self._flavour.cross:
            return []
        self._lengths[request_id] += count
        tokens = [self._random.choice([length + at, 7]) for at in range(count)]
        return [{"op": "decode", "request_id": request_id, "tokens": tokens}]

    def _an_add_token(self, request_id: int) -> list[Step]:
        count = self._random.randint(1, 4)
        if self._lengths[request_id] + count > 28:
            return []
        self._lengths[request_id] += count
        return [{"op": "add_token", "request_id": request_id, "count": count}]

    def _a_rewind(self, request_id: int) -> list[Step]:
        length = self._lengths[request_id]
        if length < 2 or self._seed.requests[request_id].beam_width > 1:
            return []
        count = self._random.randint(1, min(4, length - 1))
        self._lengths[request_id] -= count
        return [{"op": "rewind_kv_cache", "request_id": request_id, "num_tokens": count}]

    def _a_removal(self, request_id: int) -> Step:
        del self._lengths[request_id]
        return {"op": "remove_sequence", "request_id": request_id, "with_request": self._random.random() < 0.9}

    def _a_pin(self, request_id: int) -> Step:
        held = self._seed.windows[0].held[request_id]
        self._pinned.append(list(held.beams[0]))
        return {"op": "pin_blocks", "request_id": request_id}

    def _a_forecast(self, op: str, request_id: int) -> Step:
        names = [*self._lengths, *self._waiting]
        window = int(self._random.choice(list(self._config["blocks_per_window"])))
        step = {"op": op, "request_id": self._random.choice(names), "window": window}
        if op == "get_needed_blocks_one_step":
            step["two_steps_look_ahead"] = self._random.random() < 0.5
        return step

    def _a_dry_run(self, request_id: int) -> list[Step]:
        ending = self._random.sample(list(self._lengths), self._random.randint(1, len(self._lengths)))
        steps: list[Step] = [{"op": "start_scheduling"}]
        steps += [{"op": "scheduling_remove_sequence", "request_id": one} for one in ending]
        window = int(self._random.choice(list(self._config["blocks_per_window"])))
        required = self._random.randint(1, 8)
        return [*steps, {"op": "scheduling_has_free_blocks", "num_required": required, "window": window}]

    def _a_range(self, request_id: int) -> Step:
        random = self._random
        if random.random() < 0.4:
            step: Step = {"op": "block_range_for_receiving", "request_id": request_id}
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


FREE: dict[str, Callable[[_Scenario], list[Step]]] = {
    "prepare": _Scenario._a_preparation,
    "inspect": lambda one: one._of_a_block("inspect_block"),
    "set_priority": _Scenario._a_priority,
    "offload": lambda one: one._of_a_block("offload_block"),
    "find": lambda one: one._a_search("find_blocks_in_reuse_tree"),
    "find_new": lambda one: one._a_search("find_new_context_block"),
    "unpin": _Scenario._an_unpinning,
    "events": lambda one: [{"op": "get_events"}],
    "counters": lambda one: [{"op": "get_counters"}],
    "verify": lambda one: [{"op": "verify_queue_integrity"}],
    "advance": lambda one: [{"op": "advance_time_ms", "ms": one._random.choice([3, 6, 30])}],
    "refresh": lambda one: [{"op": "refresh_blocks"}],
}
HELD: dict[str, Callable[[_Scenario, int], Step | list[Step]]] = {
    "decode": _Scenario._a_decode,
    "add_token": _Scenario._an_add_token,
    "rewind": _Scenario._a_rewind,
    "remove": _Scenario._a_removal,
    "pin": _Scenario._a_pin,
    "dry_run": _Scenario._a_dry_run,
    "range": _Scenario._a_range,
    "append": lambda one, name: {"op": "append_tokens", "request_id": name, "tokens": [7]},
    "store_context": lambda one, name: {"op": "store_context_blocks", "request_id": name},
    "store_new": lambda one, name: {"op": "store_new_block", "request_id": name},
    "store_for_reuse": lambda one, name: {
        "op": "store_blocks_for_reuse",
        "request_id": name,
        "pin_blocks": "pin" in one._flavour.steps and one._random.random() < 0.7,
    },
    "onboard": lambda one, name: one._of_a_block("onboard_block", request_id=name),
    "inspect_request": lambda one, name: {"op": "inspect_request", "request_id": name},
    "last_block": lambda one, name: {"op": "get_last_block_id", "request_id": name},
    "valid": lambda one, name: {"op": "is_sequence_valid_for_store_for_reuse", "request_id": name},
    "needed": lambda one, name: one._a_forecast("get_needed_blocks_one_step", name),
    "remaining": lambda one, name: one._a_forecast("get_remaining_blocks_to_completion", name),
    "state": lambda one, name: {"op": "set_request_state", "request_id": name, "state": "generation_in_progress"},
}
