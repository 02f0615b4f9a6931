"""Microseconds of the host that a staged chunk costs its copy thread, without a GPU: all but the launch itself.

In:  nothing; every launch of a kernel, and what the driver would do in it, is left out, Triton's own Python is not.
Out: for a gather and a scatter with checksum, medians: with a table and a checksum kernel for each chunk, as before
     tables were kept, and as it is done on a GPU now; the job alone, and from its submission to its end at the mover.
Law: no byte is copied. What torch's own launches and allocations cost on a GPU is not in these numbers: two or three
     launches and an allocation of pinned memory a chunk before, one copy to pinned memory now.

    python tools/bench/host_time.py [--tokens 8192] [--chunk-mib 256] [--repeats 200] [--profile]
"""

import argparse
import cProfile
import json
import pstats
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_engine_adapter.cli.bench_pair import HEADS, LAYERS, SIZE, Side, state_of
from kv_kernels import block_table, gather, scatter
from kv_kernels.paged_copy import _copy_kernel
from kv_kernels.weighted_sum import NUM_WARPS, TILE, _sum_kernel
from kv_transfer import checksum, copies
from kv_transfer.copies import Copier
from kv_transfer.faults import NoFaults
from kv_transfer.mover import Mover
from kv_transfer.orders import BlockTables
from kv_transfer.plan.plan import Chunk, chunks_of, receive_plans
from kv_transfer.pools import PagedCaches

BLOCK = 16


class Bench(NamedTuple):
    """A rank's caches, a request in them, and its chunks."""

    copier: Callable[[], Copier]
    tables: BlockTables
    chunks: tuple[Chunk, ...]
    staged: torch.Tensor
    state: Any


class _Driver:
    """As much of Triton's driver as a launch asks."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _Compiled:
    """A kernel that is launched nowhere."""

    function = packed_metadata = None

    def launch_metadata(self, *told: Any) -> None:
        """None, as if nobody profiles."""

    def run(self, *told: Any) -> None:
        """Nothing."""


def _do_compile(self: Any, key: Any, signature: Any, device: int, *told: Any) -> _Compiled:  # noqa: ARG001
    """What is launched from now on for this key."""
    found = self.device_caches[device][0][key] = _Compiled()
    return found


def _triton(*told: Any, **more: Any) -> str:  # noqa: ARG001
    """Why not a Mock: it would count, and be counted."""
    return "triton"


def _weighted_sum(words: torch.Tensor) -> torch.Tensor:
    """The launch of the checksum kernel; torch's sum of what it has left is not counted."""
    partial = torch.empty(264 * TILE, dtype=torch.int64)
    _sum_kernel[(264,)](words, partial, words.numel(), TILE=TILE, num_warps=NUM_WARPS)
    return partial[:1]


@contextmanager
def nothing_launched(*, is_tabled: bool) -> Iterator[None]:
    """CPU tensors take the way of a GPU's, up to the launch."""
    summer = mock.patch.object(
        checksum.Summer,
        "checksum",
        lambda self, staged: checksum.pending([_weighted_sum(staged.view(torch.int64))]),  # noqa: ARG005
    )
    chosen = [mock.patch.object(module, "choose_backend", _triton) for module in (block_table, gather, scatter)]
    way = mock.patch.object(copies, "pays", return_value=is_tabled)
    compiled = mock.patch.object(triton.JITFunction, "_do_compile", _do_compile)
    # The sum of what was not copied is no checksum.
    known = mock.patch.object(checksum.Pending, "known", lambda self: 0 * sum(int(part.sum()) for part in self.pinned))
    driver.set_active(_Driver())
    with known, summer, chosen[0], chosen[1], chosen[2], way, compiled:
        _copy_kernel.device_caches.clear()
        _sum_kernel.device_caches.clear()
        yield


def bench_of(tokens: int, chunk_bytes: int) -> Bench:
    """A request of so many tokens in one rank's caches."""
    num_blocks = -(-tokens // BLOCK)
    state = state_of(Side())
    planes = [torch.empty(num_blocks, HEADS, BLOCK, SIZE, dtype=torch.bfloat16) for _ in range(2 * LAYERS)]
    layers = [[plane.transpose(1, 2) for plane in planes[2 * each : 2 * each + 2]] for each in range(LAYERS)]
    caches = PagedCaches.of_layers(state.share_of(Rank(0)), layers, BLOCK)
    (plan,) = receive_plans(state, Rank(0), state, Span(0, tokens))
    chunks = chunks_of(plan.pieces, plan.tokens, state, chunk_bytes)
    staged = torch.empty(chunk_bytes, dtype=torch.uint8)
    ids = tuple(torch.randperm(num_blocks).tolist())
    return Bench(lambda: Copier(caches, state, Rank(0), NoFaults()), BlockTables(tokens, (ids,)), chunks, staged, state)


def jobs_of(bench: Bench, way: str) -> Iterator[Callable[[], Any]]:
    """A gather, or a scatter, of each chunk; as the reactor makes them."""
    copier = bench.copier()
    while True:
        for chunk in bench.chunks:
            staged = bench.staged[: chunk.num_bytes]
            if way == "gather":
                yield copier.gather(chunk, bench.tables, staged, checksum=True)
            else:
                yield copier.scatter(b"s", chunk, bench.tables, bench.state, staged, 0, lambda: True)  # type: ignore[arg-type]


def finish(job: Callable[[], Any]) -> None:
    """Runs it to its end."""
    found = job()
    if isinstance(found, Generator):
        for _ in found:
            pass
    elif callable(found):
        found()


def alone(bench: Bench, way: str, repeats: int) -> list[float]:
    jobs, taken = jobs_of(bench, way), []
    for _ in range(repeats):
        job, began = next(jobs), time.perf_counter()
        finish(job)
        taken.append(time.perf_counter() - began)
    return taken


def at_the_mover(bench: Bench, way: str, repeats: int) -> list[float]:
    jobs, taken, over = jobs_of(bench, way), [], threading.Event()
    mover = Mover(torch.device("cpu"), lambda told: told())
    for _ in range(repeats):
        over.clear()
        job, began = next(jobs), time.perf_counter()
        mover.submit(job, None, lambda moved: over.set())  # noqa: ARG005
        over.wait()
        taken.append(time.perf_counter() - began)
    mover.close(5)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk-mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="also where the time goes, by cProfile")
    options = parser.parse_args()
    bench, found = bench_of(options.tokens, options.chunk_mib << 20), {}
    for name, is_tabled in (("a table a chunk", False), ("a table a request", True)):
        for way in ("gather", "scatter"):
            with nothing_launched(is_tabled=is_tabled):
                alone(bench, way, 10)
                job, mover = (1e6 * median(run(bench, way, options.repeats)) for run in (alone, at_the_mover))
                found[f"{way}, {name}"] = [round(job), round(mover)]
                print(f"{way:8} {name:18} {job:7.0f} us the job, {mover:7.0f} us at the mover", flush=True)
                if options.profile:
                    with cProfile.Profile() as profile:
                        alone(bench, way, options.repeats)
                    pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    print(json.dumps({"claim": "host_time", "us": found}))


if __name__ == "__main__":
    main()
