"""Time of kv_core's manager for a request, beside vLLM's KVCacheManager in the same run.

In:  a Mooncake-format trace; how many of its requests; the claim to measure.
Out: a table; the last line is one JSON object with `claim`, `ours`, `theirs`, `ratio` (microseconds a request). With
     `--append` each such object is also added to a file, with the commit and the processor.
Law: both start from the same Python list of token ids and take turns after a hundred requests, so that both meet the
     same machine and neither runs in the other's cold caches. Counted are key, match, allocate, store and free, and
     what the collector spends on objects that are new. Each of them has as many blocks and sees every token.

Claims: plain     tokens compared, no digest; against vLLM with its default and its fastest installed hash
        events    events on and a 256-bit digest for every block, against vLLM with its events on
        windows   two and three attention windows
        flat      cost of a block with 10,000 to 1,000,000 blocks and under constant eviction (ours alone)
        memory    bytes of a cached block (ours alone)

    python tools/bench/core.py [--claim plain] [--requests 1500] [--trace FILE] [--append FILE]
"""

import argparse
import gc
import json
import platform
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from time import thread_time_ns
from typing import Any, Protocol

from kv_core.config import ManagerConfig, WindowConfig
from kv_core.ids import RequestId
from kv_core.manager import KVCacheManager
from kv_core.request import Request

TRACE = Path(__file__).resolve().parents[1] / "data" / "mooncake_conversation_trace.jsonl"
TOKENS_PER_ID = 512
TOKENS_PER_BLOCK = 16
NUM_BLOCKS = 200_000
SLIDING_BLOCKS = 100_000
"""Of all blocks, those of each sliding window: vLLM's windows share one pool, ours are told their part."""
LONGEST = 1 << 18
VOCABULARY = 128_000
TURN = 100


class Contender(Protocol):
    """One manager under test."""

    name: str
    hit_tokens: int

    def prepare(self, number: int, tokens: list[int]) -> Any:
        """What is not counted: the engine's own request object."""
        ...

    def serve(self, prepared: Any) -> None:
        """What is counted."""
        ...


class Ours:
    """kv_core's manager."""

    def __init__(self, windows: Sequence[int | None], num_blocks: int, *, events: bool) -> None:
        sliding = [WindowConfig(window, SLIDING_BLOCKS) for window in sorted(one for one in windows if one is not None)]
        rest = num_blocks * len(windows) - SLIDING_BLOCKS * len(sliding)
        self._events = events
        self._manager = KVCacheManager(
            ManagerConfig(
                tokens_per_block=TOKENS_PER_BLOCK,
                windows=(*sliding, WindowConfig(LONGEST, rest)),
                max_sequence_length=LONGEST,
                event_buffer_size=1 << 20 if events else 0,
            )
        )
        self.name = "kv_core"
        self.hit_tokens = 0

    def prepare(self, number: int, tokens: list[int]) -> tuple[RequestId, list[int]]:
        return RequestId(str(number)), tokens

    def serve(self, prepared: tuple[RequestId, list[int]]) -> None:
        name, tokens = prepared
        manager = self._manager
        admission = manager.add(Request(name, tokens))
        assert admission is not None, "law: one request at a time fits"
        self.hit_tokens += admission.num_cached
        manager.publish(name)
        manager.release(name)
        if self._events:
            manager.flush_events()
            manager.take_events()


class Vllm:
    """vLLM's manager, one group of layers for each window."""

    def __init__(self, windows: Sequence[int | None], num_blocks: int, *, events: bool, hash_name: str) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager as VllmManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        hash_function = get_hash_fn_by_name(hash_name)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(TOKENS_PER_BLOCK, hash_function)
        self._events = events
        self._manager = VllmManager(
            _vllm_config(windows, num_blocks),
            max_model_len=LONGEST,
            scheduler_block_size=TOKENS_PER_BLOCK,
            hash_block_size=TOKENS_PER_BLOCK,
            enable_caching=True,
            enable_kv_cache_events=events,
        )
        self.name = f"vllm {hash_name}"
        self.hit_tokens = 0

    def prepare(self, number: int, tokens: list[int]) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request as VllmRequest

        return VllmRequest(str(number), tokens, SamplingParams(max_tokens=1), None)

    def serve(self, prepared: Any) -> None:
        prepared.block_hashes.extend(self._hasher(prepared))
        manager = self._manager
        blocks, num_cached, *_ = manager.get_computed_blocks(prepared)
        self.hit_tokens += num_cached
        taken = manager.allocate_slots(prepared, prepared.num_tokens - num_cached, num_cached, blocks)
        assert taken is not None, "law: one request at a time fits"
        manager.free(prepared)
        if self._events:
            manager.take_events()


def _vllm_config(windows: Sequence[int | None], num_blocks: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    shape = {"block_size": TOKENS_PER_BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float16}
    specs = [
        FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)
        for window in windows
    ]
    groups = [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)]
    # Its pool is shared by all groups.
    return KVCacheConfig(num_blocks * len(groups), [], groups)


@dataclass(slots=True)
class Timed:
    """Times of one contender, one for each request."""

    contender: Contender
    nanoseconds: list[int] = field(default_factory=list)

    @property
    def mean_us(self) -> float:
        return fmean(self.nanoseconds) / 1e3

    @property
    def median_us(self) -> float:
        return median(self.nanoseconds) / 1e3


def prompts(trace: Path, num_requests: int) -> Iterator[list[int]]:
    """Token ids of the trace's prompts; an id of the trace decides 512 of them."""
    with trace.open() as lines:
        for line in islice(lines, num_requests):
            row = json.loads(line)
            tokens = [token for name in row["hash_ids"] for token in _tokens_of(name)]
            yield tokens[: row["input_length"]]


def _tokens_of(name: int) -> list[int]:
    start = name * 31
    rest = [(start + at) % VOCABULARY for at in range(TOKENS_PER_ID - 2)]
    return [name % VOCABULARY, name // VOCABULARY, *rest]


def race(trace: Path, num_requests: int, contenders: Sequence[Contender]) -> list[Timed]:
    """All contenders over the same requests, in turns."""
    timed = [Timed(one) for one in contenders]
    gc.collect()
    gc.freeze()  # as an engine does after its start: what is there now is not looked at again
    numbered = enumerate(prompts(trace, num_requests))
    while turn := list(islice(numbered, TURN)):
        # Why: else a pass of the collector over what is young, which the growth of a manager triggers, looks at the
        # lists of all prompts of the turn as well: 10 ms, more than its own objects cost in the whole run.
        gc.collect(1)
        for one in timed:
            for number, tokens in turn:
                prepared = one.contender.prepare(number, tokens)
                sum(tokens)  # a prompt that was just received is in the processor's cache, for each of them
                started = thread_time_ns()
                one.contender.serve(prepared)
                one.nanoseconds.append(thread_time_ns() - started)
    gc.unfreeze()
    return timed


def fastest_hash() -> str:
    """vLLM's fastest installed hash."""
    return "xxhash" if find_spec("xxhash") else "sha256"


def compare(options: argparse.Namespace, claim: str, windows: Sequence[int | None], *, events: bool) -> dict[str, Any]:
    """Ours beside vLLM with each hash; the ratio is to its fastest."""
    names = sorted({"sha256", fastest_hash()})
    theirs = [Vllm(windows, NUM_BLOCKS, events=events, hash_name=name) for name in names]
    timed = race(options.trace, options.requests, [Ours(windows, NUM_BLOCKS, events=events), *theirs])
    print(f"{claim}: {options.requests} requests, {TOKENS_PER_BLOCK}-token blocks, {NUM_BLOCKS * len(windows)} in all")
    for one in timed:
        print(f"  {one.contender.name:16} mean {one.mean_us:9.1f} us  median {one.median_us:9.1f} us"
              f"  hit tokens {one.contender.hit_tokens}")  # fmt: skip
    ours, best = timed[0], min(timed[1:], key=lambda one: one.mean_us)
    return {
        "claim": claim,
        "ours": round(ours.mean_us, 1),
        "theirs": round(best.mean_us, 1),
        "ratio": round(best.mean_us / ours.mean_us, 2),
        "median_ratio": round(best.median_us / ours.median_us, 2),
        "hit_tokens": [ours.contender.hit_tokens, best.contender.hit_tokens],
        "against": best.contender.name,
    }


def plain(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [compare(options, "plain", [None], events=False)]


def events(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [compare(options, "events", [None], events=True)]


def windows(options: argparse.Namespace) -> list[dict[str, Any]]:
    sets: list[list[int | None]] = [[None, 4096], [None, 1024, 4096]]
    return [compare(options, f"{len(one)} windows", one, events=False) for one in sets]


def flat(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time a block of the prompts, with few blocks (constant eviction) to many."""
    costs = {}
    for num_blocks in (10_000, 100_000, 1_000_000):
        (timed,) = race(options.trace, options.requests, [Ours([None], num_blocks, events=False)])
        total = sum(len(tokens) for tokens in prompts(options.trace, options.requests)) / TOKENS_PER_BLOCK
        costs[num_blocks] = sum(timed.nanoseconds) / total
        print(f"flat: {num_blocks:9} blocks  {costs[num_blocks]:7.1f} ns a block  mean {timed.mean_us:7.1f} us")
    worst, best = max(costs.values()), min(costs.values())
    return [{"claim": "flat", "ours": costs, "theirs": None, "ratio": round(worst / best, 2)}]


def memory(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Bytes that the manager's own objects take for a cached block, when the cache is full."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    ours = Ours([None], 50_000, events=False)
    for number, tokens in enumerate(prompts(options.trace, min(options.requests, 200))):
        ours.serve(ours.prepare(number, tokens))
    gc.collect()
    per_block = (tracemalloc.get_traced_memory()[0] - before) / 50_000
    tracemalloc.stop()
    print(f"memory: {per_block:.0f} bytes a block, of which {4 * TOKENS_PER_BLOCK} are its tokens")
    return [{"claim": "memory", "ours": round(per_block, 1), "theirs": None, "ratio": None}]


CLAIMS = {"plain": plain, "events": events, "windows": windows, "flat": flat, "memory": memory}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the cache manager beside vLLM's.")
    parser.add_argument("--claim", choices=[*CLAIMS, "all"], default="plain")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--append", type=Path, help="file of result rows, one JSON object a line")
    options = parser.parse_args(arguments)
    chosen = list(CLAIMS) if options.claim == "all" else [options.claim]
    for result in (one for claim in chosen for one in CLAIMS[claim](options)):
        print(json.dumps(result), flush=True)
        if options.append is not None:
            append(options.append, result | {"requests": options.requests})
    return 0


def append(path: Path, result: dict[str, Any]) -> None:
    """One more row, with what it was measured on."""
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, check=True
    )
    row = {
        "commit": head.stdout.decode().strip(),
        "machine": machine_name(),
        "python": platform.python_version(),
    } | result
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as rows:
        rows.write(json.dumps(row) + "\n")


def machine_name() -> str:
    """The processor and how many of it there are."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
