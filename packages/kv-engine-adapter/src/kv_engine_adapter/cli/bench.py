"""`kvferry bench paths`: which path is faster on this machine, for runs of which length.

In:  a CPU, or two GPUs of this host.
Out: GB/s of every path at each length, and the setting `in_place_run_bytes` that follows; one JSON line, to be kept
     with the settings (machine, date, command, figures).
Law: bytes are proven before they are timed, as `bench_pair` does. A threshold is told only if reading in place is
     faster for all measured lengths from it on.
"""

import argparse
import json
import multiprocessing as mp
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from statistics import median
from typing import Any, Final

from kv_engine_adapter.cli.arguments import count, even_count, two_names
from kv_engine_adapter.cli.bench_pair import TOKEN_BYTES, Case, Side, pair

ROW_BYTES: Final = 2048
"""Of one token of one plane: a block of n tokens is one run of n rows."""
PATHS: Final[dict[str, dict[str, Any]]] = {
    "staged": {"direct": False},
    "in place": {"direct": False, "own_blocks": True, "in_place_run_bytes": 1},
    "direct": {},
}
MEASURE_S: Final = 600.0
"""How long one path at one length may take, with the start of its process."""
END_S: Final = 10.0
"""How long a process that has told its figures may take to end."""
KIBS: Final = (4, 16, 32, 64, 256, 1024)

Figures = dict[int, dict[str, float]]
"""GB/s of each path, by the KiB of a run."""


def threshold(figures: Figures) -> int | None:
    """The KiB from which on reading in place is faster than staging at every length; None if it never is."""
    found = None
    for kib in sorted(figures, reverse=True):
        if figures[kib]["in place"] <= figures[kib]["staged"]:
            break
        found = kib
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(prog="kvferry bench", description="Measure the data paths on this machine.")
    parser.add_argument("what", choices=("paths",))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gpus", type=two_names, default="0,1", help="of sender and receiver (default 0,1)")
    parser.add_argument("--mib", type=count, default=256, help="of a request (default 256)")
    parser.add_argument("--kib", type=even_count, nargs="+", default=list(KIBS), help="of a run: multiples of 2")
    parser.add_argument("--repeats", type=count, default=5)
    options = parser.parse_args(arguments)
    gpus: tuple[str, str] | None = options.gpus if options.device == "cuda" else None
    paths = [path for path in PATHS if path != "direct" or gpus]
    figures: Figures = {}
    for kib in sorted(options.kib):
        found = {path: _measured(path, kib, gpus, options) for path in paths}
        if None in found.values():
            print("kvferry bench: nothing was measured, see above", file=sys.stderr)
            return 2
        figures[kib] = {path: gbps for path, gbps in found.items() if gbps is not None}
        columns = "   ".join(f"{path} {gbps:7.2f}" for path, gbps in figures[kib].items())
        print(f"runs of {kib:5} KiB, GB/s:   {columns}", flush=True)
    _tell(figures, options)
    return 0


def _measured(path: str, kib: int, gpus: tuple[str, str] | None, options: argparse.Namespace) -> float | None:
    """GB/s of one path; in a process of its own, which may begin CUDA. None if that ended without a word, or hangs."""
    block = kib * 1024 // ROW_BYTES
    tokens = max(1, options.mib * (1 << 20) // (block * TOKEN_BYTES)) * block
    case = Case(Side(block=block), Side(block=block), tokens, settings=PATHS[path])
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(theirs, case, gpus, options.repeats))
    process.start()
    theirs.close()
    try:
        if not pipe.poll(MEASURE_S):
            print(f"kvferry bench: {path} at {kib} KiB did not end in {MEASURE_S:g} s", file=sys.stderr)
            return None
        seconds, taken = pipe.recv()
    except EOFError:
        return None
    finally:
        _end(process)
    assert taken == {path}, f"another path was taken: wanted={path}, taken={taken}"
    return case.num_bytes(1) / float(median(seconds)) / 1e9


def _end(process: SpawnProcess) -> None:
    process.join(END_S)
    if process.is_alive():
        process.kill()
        process.join()


def _measure(pipe: Connection, case: Case, gpus: tuple[str, str] | None, repeats: int) -> None:
    with pair(case, gpus) as made:
        made.prove()
        seconds = [made.load() for _ in range(repeats)]
        pipe.send((seconds, made.paths))


def _tell(figures: Figures, options: argparse.Namespace) -> None:
    from kv_transfer.agent.nixl import shares_memory
    from kv_transfer.thresholds import IN_PLACE_RUN, Link

    link: Link = (
        "device"
        if options.device != "cpu"
        else "shared memory"
        if shares_memory(os.environ.get("UCX_TLS"))
        else "network"
    )
    found, default = threshold(figures), IN_PLACE_RUN[link]
    setting = None if found is None else found * 1024
    of = f"{default.machine}, {default.date}: {default.evidence}"
    print(f"in_place_run_bytes: here {setting or 'never pays'}, default {default.num_bytes} ({of})")
    words = {
        "machine": _machine(options.device),
        "date": time.strftime("%Y-%m-%d"),
        "command": f"kvferry bench paths --device {options.device} --mib {options.mib}",
        "in_place_run_bytes": setting,
        "gbps": {kib: {path: round(gbps, 2) for path, gbps in found.items()} for kib, found in figures.items()},
    }
    print(json.dumps(words))


def _machine(device: str) -> str:
    if device == "cpu":
        return f"{platform.processor() or platform.machine()}, {platform.system()} {platform.release()}"
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return ", ".join(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[:2])
    except (OSError, subprocess.CalledProcessError):
        return "GPUs of unknown name"  # figures that took minutes are not lost for a name
