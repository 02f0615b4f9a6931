"""Every data path between two GPUs, from the order to the proven end, beside NIXL alone in the same processes.

In:  two GPUs of one host (or a CPU with --device cpu, where there is no direct path).
Out: GB/s of each case with one request and with four at once, `results/gpu_paths.csv`; the stages of a request; what a
     chunk costs the host: to queue its gather, its post and its scatter; a JSON line with the ratio of staged to one
     descriptor a block, and the share that checksums cost.
Law: a request is 1 GiB in random blocks (--tokens 8192). Its bytes are proven before anything is timed. Rates count the
     messages before and after the bytes: `peer_copy.py` has those of the kernel alone.

    python tools/bench/gpu_paths.py [--cases direct relaid staged swept large] [--tokens 8192] [--repeats 7]
"""

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from gpu_rows import Table, device_name
from in_flight import Plan, Told, add_gpus, gpus_of, measured
from plain_nixl import plain_of

from kv_engine_adapter.cli.bench_pair import Case, Side

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
STAGED: dict[str, Any] = {"direct": False}
HEAD, TOKEN = Side(), Side("token_major")


LARGE = ((2048, 64, 64), (2048, 128, 128), (2048, 256, 256), (4096, 256, 256), (4096, 512, 512))
"""Arena, chunk and post in MiB; half of an arena is one peer's, so its chunks under way are half of the first over the
second."""


class Row(NamedTuple):
    """A case, and the least that four requests at once (one, if staged) must reach, in GB/s."""

    name: str
    case: Case
    bar: float = 0.0


def direct() -> Iterator[Row]:
    """Caches that lie alike."""
    yield Row("direct, same layout", Case(HEAD, HEAD), 365.0)


def relaid() -> Iterator[Row]:
    """Caches that differ: the kernel re-lays them on the way."""
    yield Row("direct, TP 2 to 1", Case(Side(tp=2), HEAD), 345.0)
    yield Row("direct, TP 1 to 2", Case(HEAD, Side(tp=2)), 345.0)
    yield Row("direct, 16 to 64 tokens a block", Case(HEAD, Side(block=64)), 345.0)
    yield Row("direct, 64 to 16 tokens a block", Case(Side(block=64), HEAD), 345.0)
    yield Row("direct, head-major to token-major", Case(HEAD, TOKEN), 345.0)


def staged() -> Iterator[Row]:
    """As a pair on two hosts: defaults, with and without checksums."""
    yield Row("staged", Case(settings=STAGED, plain=plain_of), 200.0)
    yield Row("staged, no checksum", Case(settings=STAGED | {"checksum": False}))


def large() -> Iterator[Row]:
    """Large arenas and chunks, each in one post."""
    yield from (sized(*sizes) for sizes in LARGE)


def swept() -> Iterator[Row]:
    """Sizes of arenas and chunks, and bytes of one post."""
    for arena, chunk, post in (*product((256, 1024), (32, 64, 128), (16, 128)), *LARGE):
        if chunk * 4 > arena and chunk != 64:
            continue
        yield sized(arena, chunk, post)


def sized(arena: int, chunk: int, post: int) -> Row:
    """Staged with these sizes, in MiB."""
    arenas = {"send_arena_bytes": arena * MIB, "receive_arena_bytes": arena * MIB}
    settings = STAGED | arenas | {"chunk_bytes": chunk * MIB, "chunks_in_flight": 8}
    name = f"staged, arena {arena}, chunk {chunk}, post {post} MiB"
    return Row(name, Case(settings=settings, limits={"max_post_bytes": post * MIB}))


GROUPS = {"direct": direct, "relaid": relaid, "staged": staged, "swept": swept, "large": large}


def scaled(case: Case, tokens: int, at_once: int) -> Case:
    """The case with requests of another size, so many."""
    settings = case.settings | {"request_deadline_s": 120.0}
    return Case(case.theirs, case.ours, tokens, at_once, settings, case.limits, case.plain)


def add(table: Table, row: Row, case: Case, told: Told) -> None:
    """One line, held to the bar if it is the number of requests that the bar is for."""
    path = row.name.split(",")[0]
    if told.paths == {"plain"}:
        table.timed("one descriptor a block, NIXL alone", case.num_bytes(told.num_requests), told.seconds)
        return
    assert told.paths == {path}, f"another path: wanted={path}, taken={told.paths}"
    is_held = told.num_requests == case.num_requests
    name = f"{row.name}, {told.num_requests} at once"
    table.timed(name, case.num_bytes(told.num_requests), told.seconds, bar=row.bar if is_held else 0.0)
    print(f"    stages of a request, ms: {told.stages}", flush=True)
    told.print_host()


def summary(table: Table) -> dict[str, float]:
    """Ratios within this run; those for which something was not measured are left out."""
    found = {row.case: row.gbps for row in table.rows}
    ratios = {
        "staged / a descriptor a block": ("staged, 4 at once", "one descriptor a block, NIXL alone"),
        "staged with / without checksum": ("staged, 4 at once", "staged, no checksum, 4 at once"),
    }
    return {
        name: round(found[ours] / found[theirs], 2)
        for name, (ours, theirs) in ratios.items()
        if ours in found and found.get(theirs)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_gpus(parser)
    parser.add_argument("--cases", nargs="+", choices=GROUPS, default=["direct", "relaid", "staged"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    gpus = gpus_of(options)
    table, plan = Table("gpu_paths", device_name(options.device)), Plan((1, options.at_once), options.repeats)
    for row in (row for group in options.cases for row in GROUPS[group]()):
        if gpus is None and row.name.startswith("direct"):
            continue
        case = scaled(row.case, options.tokens, options.at_once)
        try:
            for told in measured(case, gpus, plan):
                add(table, row, case, told)
        except RuntimeError as error:
            # The others are still worth their time.
            print(f"{row.name}: {error}", flush=True)
    print(json.dumps(summary(table)))
    table.finish(options.out)


if __name__ == "__main__":
    main()
