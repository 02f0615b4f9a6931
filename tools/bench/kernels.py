"""Gather, scatter, block copy and host copies of one GPU, beside a plain copy in the same run.

In:  one GPU; `--sweep` also tries other tunings; `--out` a folder for the CSV.
Out: payload in GB/s (bytes copied, so that a plain copy reads and writes as much), `results/kernels.csv`.
Law: block ids are random; 32 layers of bf16, 8 heads of 128, blocks of 16 tokens, 1 GiB of payload.

    python tools/bench/kernels.py [--sweep] [--parts device parts host] [--out FOLDER]

`parts`: a request's table that is kept, with the checksum in the same pass and in one of its own; and what the host
needs to queue a copy each way.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from gpu_rows import DEVICE, HEADS, LAYERS, RESULTS, SIZE, Table, device_copy, ids_of, label, planes_of, seconds
from torch import Tensor

from kv_kernels.block_copy import copy_blocks
from kv_kernels.block_table import At, BlockTable, Copied, gather_part, scatter_part
from kv_kernels.gather import gather
from kv_kernels.scatter import scatter
from kv_kernels.tuning import HOST, LOCAL, SUMMING, Tuning
from kv_kernels.weighted_sum import weighted_sum
from kv_transfer.checksum import pending

TOKENS = 8192
Copy = Callable[[], object]


def dense_of(order: str, tokens: int, heads: int, *, pinned: bool = False) -> Tensor:
    shape = (2 * LAYERS, tokens, heads, SIZE) if order == "BTHD" else (2 * LAYERS, heads, tokens, SIZE)
    dense = torch.zeros(shape, dtype=torch.bfloat16, device="cpu" if pinned else DEVICE, pin_memory=pinned)
    return dense if order == "BTHD" else dense.transpose(1, 2)


# (case, memory of planes, of the dense view, heads, tokens, share of the device copy that is to be reached)
CASES = [
    ("head-major, all heads", "BHTD", "BHTD", 8, TOKENS, 0.93),
    ("head-major, half of the heads", "BHTD", "BHTD", 4, 2 * TOKENS, 0.93),
    ("head-major, one head", "BHTD", "BHTD", 1, 8 * TOKENS, 0.93),
    ("token-major, all heads", "BTHD", "BTHD", 8, TOKENS, 0.93),
    ("token-major, half of the heads (1 KiB)", "BTHD", "BTHD", 4, 2 * TOKENS, 0.75),
    ("head-major to token-major", "BHTD", "BTHD", 8, TOKENS, 0.75),
    ("head-major, all heads, 8,187 tokens from slot 3", "BHTD", "BHTD", 8, TOKENS - 5, 0.93),
]


def local(table: Table, tunings: list[Tuning], copy_gbps: float) -> None:
    for case, memory, wire, heads, tokens, share in CASES:
        planes, dense = planes_of(memory, held=tokens + 4096), dense_of(wire, tokens, heads)
        ids, first = ids_of(planes, tokens + 16), 3 if "slot 3" in case else 0
        for tuning in tunings:
            bar = share * copy_gbps if tuning == LOCAL else 0.0
            window: Any = {"first_token": first, "first_head": HEADS - heads, "tuning": tuning}
            time = seconds(lambda p=planes, d=dense, i=ids, w=window: gather(d, p, i, **w))
            table.add(f"gather {case}", dense.nbytes / time / 1e9, tuning=label(tuning), bar=bar)
            time = seconds(lambda p=planes, d=dense, i=ids, w=window: scatter(p, d, i, **w))
            table.add(f"scatter {case}", dense.nbytes / time / 1e9, tuning=label(tuning), bar=bar)
        del planes, dense


def parts(table: Table, copy_gbps: float) -> None:
    """The chunks of a request are parts of one table; a checksum is fetched by a small copy behind the kernel."""
    few = [Tuning(SUMMING.tile_words, SUMMING.num_warps, programs) for programs in (528, 1056, 4224, None)]
    for memory in ("BHTD", "BTHD"):
        planes, dense = planes_of(memory), dense_of(memory, TOKENS, HEADS)
        ids = ids_of(planes, TOKENS)
        kept, flat = BlockTable(planes, ids), dense if memory == "BTHD" else dense.transpose(1, 2)
        words = flat.view(torch.int64).view(-1)
        for tuning in (SUMMING, *few):
            ways: dict[str, Copy] = {
                "gather": partial(gather_part, dense, kept, At(), tuning=tuning),
                "scatter": partial(scatter_part, kept, dense, At(), tuning=tuning),
                "gather with checksum": partial(fetched, gather_part, dense, kept, tuning),
                "scatter with checksum": partial(fetched, scatter_part, kept, dense, tuning),
            }
            for name, call in ways.items():
                bar, case = 0.93 * copy_gbps if tuning == SUMMING else 0.0, f"{name}, kept table, {memory}"
                table.add(case, dense.nbytes / seconds(call) / 1e9, tuning=label(tuning), bar=bar)
                if tuning == SUMMING:
                    print(f"    {host_us(call):.0f} us of the host a call", flush=True)
        apart = partial(apart_sum, dense, planes, ids, words)
        table.add(f"gather, checksum apart, {memory}", dense.nbytes / seconds(apart) / 1e9, tuning=label(LOCAL))
        print(f"    {host_us(apart):.0f} us of the host a call", flush=True)
        del planes, dense, kept, flat, words, apart


def fetched(copy: Callable[..., Copied], one: Any, other: Any, tuning: Tuning) -> object:
    """The copy, and its checksum on its way to the host."""
    sums = copy(one, other, At(), summed_at=0, tuning=tuning).sums
    assert sums is not None, "law: a sum that is wanted is told"
    return pending([sums])


def apart_sum(dense: Tensor, planes: list[Tensor], ids: list[int], words: Tensor) -> object:
    """A table for this call, and a pass of its own for the checksum."""
    gather(dense, planes, ids, first_token=0, first_head=0)
    return pending([weighted_sum(words)])


def host_us(call: Copy, calls: int = 20) -> float:
    """Microseconds of the host for a call, queued behind a sleep that is longer than all of them."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    began = perf_counter()
    kept = [call() for _ in range(calls)]
    took = perf_counter() - began
    del kept
    torch.cuda.synchronize()
    return 1e6 * took / calls


def against_index_select(table: Table) -> None:
    """Half of the heads as torch does it, a call for each plane; one plane alone would stay in the L2 cache."""
    planes = planes_of("BHTD", held=2 * TOKENS + 4096)
    views = [plane.transpose(1, 2)[:, : HEADS // 2] for plane in planes]
    ids = torch.tensor(ids_of(planes, 2 * TOKENS), device=DEVICE)
    out = torch.empty(2 * LAYERS, len(ids), HEADS // 2, 16, SIZE, dtype=torch.bfloat16, device=DEVICE)

    def call() -> None:
        for view, part in zip(views, out, strict=True):
            torch.index_select(view, 0, ids, out=part)

    table.add("torch index_select, half of the heads", out.nbytes / seconds(call) / 1e9)


def blocks(table: Table) -> None:
    for case, ours, theirs in [("same", ("BHTD", 16), ("BHTD", 16)), ("16 to 64", ("BHTD", 64), ("BHTD", 16))]:
        target, source = planes_of(*ours), planes_of(*theirs)
        to, of = ids_of(target, TOKENS), ids_of(source, TOKENS)
        time = seconds(
            lambda t=target, s=source, to=to, of=of: copy_blocks(t, to, s, of, num_tokens=TOKENS, num_heads=HEADS)
        )
        table.add(f"block copy {case}", 2 * LAYERS * TOKENS * HEADS * SIZE * 2 / time / 1e9)


def host(table: Table, tunings: list[Tuning]) -> None:
    planes = planes_of("BHTD")
    ids, other = ids_of(planes, TOKENS), ids_of(planes, TOKENS + 4096)[TOKENS // 16 :]
    dense = dense_of("BHTD", TOKENS, HEADS, pinned=True)
    few = dense_of("BHTD", 4096, HEADS, pinned=True)
    window: Any = {"first_token": 0, "first_head": 0}
    few_out = dense_of("BHTD", 4096, HEADS, pinned=True)
    for tuning in tunings:
        bars = (50.0, 95.0) if tuning == HOST else (0.0, 0.0)
        name = label(tuning)
        time = seconds(lambda t=tuning: gather(dense, planes, ids, **window, tuning=t), 5)
        table.add("device to pinned host", dense.nbytes / time / 1e9, tuning=name, bar=bars[0])
        time = seconds(lambda t=tuning: scatter(planes, dense, ids, **window, tuning=t), 5)
        table.add("pinned host to device", dense.nbytes / time / 1e9, tuning=name, bar=bars[0])
        out = lambda t=tuning: gather(few_out, planes, ids[: 4096 // 16], **window, tuning=t)  # noqa: E731
        into = lambda t=tuning: scatter(planes, few, other, **window, tuning=t)  # noqa: E731
        time = seconds(at_once(out, into), 5)
        table.add("both ways at once", 2 * few.nbytes / time / 1e9, tuning=name, bar=bars[1])
    engines(table, planes, (ids[: 4096 // 16], other), (few_out, few))


def at_once(out: Copy, into: Copy) -> Copy:
    """Both copies, each on a stream of its own; the current stream waits for both."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            into()
        out()
        torch.cuda.current_stream().wait_stream(side)

    return both


def engines(table: Table, planes: list[Tensor], ids: tuple[list[int], list[int]], few: tuple[Tensor, Tensor]) -> None:
    """Both ways at once with copy engines for one way or both: what the engine moves is dense on the device, and our
    kernel re-lays it there, chunk by chunk, so that a chunk is on the bus while the next is re-laid."""
    out, into = few
    for planes_a_chunk in (4, 16, 64):
        ways = {
            f"engine out, kernel in, {planes_a_chunk} planes": (
                engine_out(planes, ids[0], out, planes_a_chunk),
                lambda: scatter(planes, into, ids[1], first_token=0, first_head=0, tuning=HOST),
            ),
            f"kernel out, engine in, {planes_a_chunk} planes": (
                lambda: gather(out, planes, ids[0], first_token=0, first_head=0, tuning=HOST),
                engine_in(planes, ids[1], into, planes_a_chunk),
            ),
            f"engines both ways, {planes_a_chunk} planes": (
                engine_out(planes, ids[0], out, planes_a_chunk),
                engine_in(planes, ids[1], into, planes_a_chunk),
            ),
        }
        for name, (one, other) in ways.items():
            time = seconds(at_once(one, other), 5)
            table.add("both ways at once", 2 * out.nbytes / time / 1e9, tuning=name, bar=95.0)
    prove_engines(planes, ids, few)


def engine_out(planes: list[Tensor], ids: list[int], host: Tensor, step: int) -> Copy:
    """A gather into memory of the device, and a copy of each chunk of planes to the host behind it."""
    staged, bus = torch.empty_like(host, device=DEVICE), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run() -> None:
        stream = torch.cuda.current_stream()
        for start in range(0, len(planes), step):
            some = slice(start, start + step)
            gather(staged[some], planes[some], ids, first_token=0, first_head=0)
            bus.wait_stream(stream)
            with torch.cuda.stream(bus):
                host[some].copy_(staged[some], non_blocking=True)
        stream.wait_stream(bus)

    return run


def engine_in(planes: list[Tensor], ids: list[int], host: Tensor, step: int) -> Copy:
    """The same from the host: a copy of each chunk of planes, and a scatter behind it."""
    staged, bus = torch.empty_like(host, device=DEVICE), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run() -> None:
        stream = torch.cuda.current_stream()
        bus.wait_stream(stream)
        for start in range(0, len(planes), step):
            some = slice(start, start + step)
            with torch.cuda.stream(bus):
                staged[some].copy_(host[some], non_blocking=True)
            stream.wait_stream(bus)
            scatter(planes[some], staged[some], ids, first_token=0, first_head=0)

    return run


def prove_engines(planes: list[Tensor], ids: tuple[list[int], list[int]], few: tuple[Tensor, Tensor]) -> None:
    """AssertionError unless what the engines bring out and in is what the kernel brings."""
    out, into = few
    into.copy_(torch.randint(-99, 99, into.shape, dtype=torch.int16).to(into.dtype))
    engine_in(planes, ids[1], into, 16)()
    engine_out(planes, ids[1], out, 16)()
    torch.cuda.synchronize()
    assert torch.equal(out, into), "what went in by the engines does not come out again"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=("device", "parts", "host"), default=["device", "parts", "host"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("not measured: this benchmark needs a GPU")
        return
    table = Table("kernels")
    swept = [Tuning(words, warps) for words, warps in product((512, 1024, 2048), (4, 8, 16))] if options.sweep else []
    hosts = [Tuning(2048, warps, programs) for warps, programs in product((4, 16), (32, 132, 264, 528, None))]
    copy_gbps = device_copy(table)
    if "device" in options.parts:
        local(table, [LOCAL, *(one for one in swept if one != LOCAL)], copy_gbps)
        against_index_select(table)
        blocks(table)
    if "parts" in options.parts:
        parts(table, copy_gbps)
    if "host" in options.parts:
        host(table, [HOST, *(one for one in hosts if one != HOST)] if options.sweep else [HOST])
    table.finish(options.out)


if __name__ == "__main__":
    main()
