"""How much a step of a model, bound by memory, slows down while the direct path reads, on either GPU.

In:  two GPUs of one host; each process sees one of them only.
Out: for each number of programs the rate of the copy and the slow-down of a step, on the GPU that reads and on the one
     that is read; the mean over a run with a hand-over of 15,000 tokens every second; `results/slowdown.csv`.
Law: the copy outlasts the steps that are timed beside it, and its rate is that of the copies that lie between them. A
     step reads the weights of an 8B model once (32 layers, 14 GB, 8 tokens), as one CUDA graph.

    python tools/bench/slowdown.py [--programs 8 16 32 64 132] [--seconds 6] [--out FOLDER]
"""

import argparse
import csv
import json
import multiprocessing as mp
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"
KIND = ("BHTD", 16, 8)
TOKENS = 8192
HANDOVER = 15_000
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
MATRICES = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]
STEPS = 20
BARS = {"reads": 15.0, "is read": 10.0, "averaged": 2.0}
FAST_GBPS = 300.0
"""The bars are for copies of at least this rate."""


@dataclass(frozen=True)
class Row:
    """Medians of a step in milliseconds, alone and beside the copy; `bar_pct`: the most it may be slower, 0 if none."""

    commit: str
    gpu: str
    side: str
    programs: int
    gbps: float
    alone_ms: float
    beside_ms: float
    slowdown_pct: float
    bar_pct: float


def model_step() -> Callable[[], None]:
    """A step of the model on this GPU."""
    import torch

    layers = [[torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in MATRICES] for _ in range(32)]
    inputs = {rows: torch.randn(8, rows, dtype=torch.bfloat16, device="cuda") for rows, _ in MATRICES}
    outs = [torch.empty(8, columns, dtype=torch.bfloat16, device="cuda") for _, columns in MATRICES]

    def run() -> None:
        for weights in layers:
            for weight, out in zip(weights, outs, strict=True):
                torch.mm(inputs[weight.shape[0]], weight, out=out)

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def event() -> Any:
    import torch

    found = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    found.record()
    return found


def timed_steps(step: Callable[[], None], count: int = STEPS) -> list[Any]:
    """Events around each of so many steps, queued on the current stream."""
    marks = [event()]
    for _ in range(count):
        step()
        marks.append(event())
    return marks


def step_ms(marks: list[Any]) -> float:
    marks[-1].synchronize()
    return float(median(one.elapsed_time(other) for one, other in pairwise(marks)))


def owner(gpu: str, pipe: Connection) -> None:
    """Holds the cache that is read; times its own steps whenever it is told to, until it is told None."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch
    from peer_copy import export, make_caches

    from kv_kernels.layout import MappedPlanes

    planes, step = make_caches(KIND, 1), model_step()
    torch.cuda.synchronize()
    handle, base = export(planes[0].data_ptr())
    pipe.send((handle, MappedPlanes.of(planes, -base)))
    while pipe.recv() is not None:
        timed_steps(step, 3)
        pipe.send(step_ms(timed_steps(step)))


class Reader:
    """The GPU that reads, with a step of its own."""

    def __init__(self, pipe: Connection) -> None:
        import torch
        from gpu_rows import ids_of, planes_of
        from peer_copy import TOKENS_HELD, open_handle

        self._pipe = pipe
        handle, remote = pipe.recv()
        torch.zeros(1, device="cuda")  # makes the context that a handle is opened in
        mapped = open_handle(handle)
        self._source = replace(remote, addresses=tuple(mapped + offset for offset in remote.addresses))
        self._planes = planes_of(*KIND, held=TOKENS_HELD)
        self._ids = ids_of(self._planes, TOKENS_HELD)
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.step = model_step()

    def copy(self, programs: int, tokens: int = TOKENS) -> Any:
        """Queues one copy beside the current stream, and an event behind it."""
        import torch

        from kv_kernels.peer import peer_copy
        from kv_kernels.tuning import PEER

        blocks, tuning = -(-tokens // 16), replace(PEER, num_programs=programs)
        to, of = self._ids[:blocks], self._ids[-blocks:]
        with torch.cuda.stream(self._side):
            peer_copy(self._planes, to, self._source, of, num_tokens=tokens, num_heads=8, tuning=tuning)
            return event()

    def copy_ms(self, programs: int) -> float:
        """Of one copy alone."""
        ends = [self.copy(programs) for _ in range(6)]
        ends[-1].synchronize()
        return float(median(one.elapsed_time(other) for one, other in pairwise(ends[1:])))

    def beside(self, programs: int, alone_ms: float) -> tuple[float, float]:
        """(a step's milliseconds, GB/s of the copy) of this GPU, both at once."""
        import torch

        num_copies = int(3 * STEPS * alone_ms / self.copy_ms(programs)) + 4
        ends = [self.copy(programs) for _ in range(num_copies)]
        ends[0].synchronize()
        marks = timed_steps(self.step)
        found = step_ms(marks)
        assert not ends[-1].query(), f"the copy was over before the steps: programs={programs}"
        torch.cuda.synchronize()
        within = [end for end in ends if marks[0].elapsed_time(end) > 0 and end.elapsed_time(marks[-1]) > 0]
        assert len(within) > 1, f"no copy lies between the steps: programs={programs}"
        took_ms = within[0].elapsed_time(within[-1])
        return found, (len(within) - 1) * TOKENS * TOKEN_BYTES / took_ms / 1e6

    def while_owner_steps(self, programs: int | None) -> tuple[float, float]:
        """(a step's milliseconds of the GPU that is read, GB/s of the copy); without a copy if None."""
        if programs is None:
            self._pipe.send("step")
            return float(self._pipe.recv()), 0.0
        ends = [self.copy(programs) for _ in range(4)]
        self._pipe.send("step")
        while not self._pipe.poll():
            ends.append(self.copy(programs))
            ends[-4].synchronize()
        ends[-1].synchronize()
        took_ms = ends[0].elapsed_time(ends[-1])
        return float(self._pipe.recv()), (len(ends) - 1) * TOKENS * TOKEN_BYTES / took_ms / 1e6

    def steps_in(self, seconds: float, *, with_copies: bool) -> float:
        """Milliseconds of a step over so long a time, with a hand-over every second or none."""
        import torch

        from kv_kernels.tuning import PEER

        torch.cuda.synchronize()
        start, count, copies = time.perf_counter(), 0, 0
        while (now := time.perf_counter() - start) < seconds:
            if with_copies and now >= copies:
                self.copy(PEER.num_programs or 64, HANDOVER)
                copies += 1
            self.step()
            count += 1
            if count % 2 == 0:
                event().synchronize()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / count


def reader(gpu: str, pipe: Connection, programs: list[int], seconds: float, out: Path) -> None:
    """Measures all, and writes the rows."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch
    from gpu_rows import Table

    from kv_kernels.tuning import PEER

    side, where, rows = Reader(pipe), Table("slowdown"), list[Row]()

    def add(name: str, number: int, gbps: float, alone: float, beside: float) -> None:
        slower = 100 * (beside / alone - 1)
        bar = BARS[name] if name == "averaged" or (number == PEER.num_programs and gbps >= FAST_GBPS) else 0.0
        figures = (round(gbps, 1), round(alone, 3), round(beside, 3), round(slower, 1), bar)
        rows.append(Row(where.commit, where.gpu, name, number, *figures))
        verdict = "" if not bar else f"  most {bar:.0f} %: {'kept' if slower <= bar else 'MISSED'}"
        print(f"{name:9} {number:4} programs {gbps:7.1f} GB/s  step {alone:.2f} -> {beside:.2f} ms", end="")
        print(f"  {slower:5.1f} % slower{verdict}", flush=True)

    timed_steps(side.step, 5)
    torch.cuda.synchronize()
    side.copy_ms(64)
    for number in programs:
        alone = step_ms(timed_steps(side.step))
        beside, gbps = side.beside(number, alone)
        add("reads", number, gbps, alone, beside)
        theirs, _ = side.while_owner_steps(None)
        beside, gbps = side.while_owner_steps(number)
        add("is read", number, gbps, theirs, beside)
    turns = [(side.steps_in(seconds, with_copies=False), side.steps_in(seconds, with_copies=True)) for _ in range(2)]
    alone, beside = (median(column) for column in zip(*turns, strict=True))
    add("averaged", PEER.num_programs or 0, HANDOVER * TOKEN_BYTES / 1e9, alone, beside)
    pipe.send(None)
    keep(rows, out)
    missed = [f"{row.side} {row.programs}" for row in rows if row.bar_pct and row.slowdown_pct > row.bar_pct]
    print(json.dumps({"claim": "slowdown", "rows": len(rows), "missed": missed}))


def keep(rows: list[Row], folder: Path) -> None:
    """Appends to the CSV file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "slowdown.csv"
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        if is_new:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, nargs="+", default=[8, 16, 24, 32, 48, 64, 132])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each averaged run")
    parser.add_argument("--gpus", default="0,1", help="that is read, that reads")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print("not measured: this benchmark needs two GPUs of one host")
        return
    owners, readers = options.gpus.split(",")
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    processes = [
        context.Process(target=owner, args=(owners, theirs), daemon=True),
        context.Process(target=reader, args=(readers, ours, options.programs, options.seconds, options.out)),
    ]
    for process in processes:
        process.start()
    processes[1].join()
    processes[0].kill()
    raise SystemExit(processes[1].exitcode)


if __name__ == "__main__":
    main()
