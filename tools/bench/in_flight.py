"""Many hand-overs at once between two engines' transfer layers, without engines.

In:  two GPUs of one host (or a CPU with --device cpu, where all is staged); how many requests, of how many tokens.
Out: GB/s of all together, from the first order to the last Received, `results/in_flight.csv`, and their stages.
Law: each process sees one GPU; the bytes of every request are proven before anything is timed. The bar is 80 % of what
     one kernel reads over the link (--link, GB/s: the median of `peer_copy.py`).

    python tools/bench/in_flight.py [--requests 1 8 64] [--tokens 4096] [--paths direct staged] [--out FOLDER]

`--profile FILE` also profiles the reactor of the receiver over one round (cProfile, sorted by own time).
"""

import argparse
import cProfile
import multiprocessing as mp
import pstats
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from kv_engine_adapter.cli.bench_pair import Case, pair
from kv_engine_adapter.cli.host_times import Took

PATHS: dict[str, dict[str, Any]] = {
    "direct": {},
    "staged": {"direct": False},
    "staged, no checksum": {"direct": False, "checksum": False},
}
SHARE = 0.8
RESULTS = Path(__file__).parent / "results"
Gpus = tuple[str, str] | None
"""Of the sender and of the receiver; None: both are on the CPU."""


class Plan(NamedTuple):
    """What is timed: numbers of requests at once, each so often."""

    at_once: tuple[int, ...]
    repeats: int
    profile: Path | None = None


class Told(NamedTuple):
    """The rounds of so many requests at once: their seconds, the paths taken, medians of stages in milliseconds, what a
    chunk cost the host."""

    num_requests: int
    seconds: list[float]
    paths: set[str]
    stages: dict[str, float]
    host: dict[str, dict[str, Took]]

    def print_host(self) -> None:
        """One line a side."""
        for side, times in self.host.items():
            each = (f"{name} {took.took_us:.0f} ({took.ran_us:.0f} running)" for name, took in times.items())
            print(f"    host time a chunk, us, {side}: {', '.join(each)}", flush=True)


def measure(pipe: Connection, case: Case, gpus: Gpus, plan: Plan) -> None:
    """In a process of its own, which begins CUDA: a Told for each number of requests at once."""
    with pair(case, gpus) as made:
        made.prove()
        told = []
        made.host()
        for num_requests in plan.at_once:
            seconds = [made.load(num_requests) for _ in range(plan.repeats)]
            told.append(Told(num_requests, seconds, made.paths, made.stages(), made.host()))
        if case.plain:
            made.read_plainly()
            made.ranks.clear()
            made.read_plainly()
            made.ranks.check()
            told.append(Told(case.num_requests, [made.read_plainly() for _ in range(plan.repeats)], {"plain"}, {}, {}))
        if plan.profile is not None:
            profiled(made, plan.profile)
        pipe.send(told)


def profiled(made: Any, path: Path) -> None:
    """One more round, in which the reactor of the first rank is profiled."""
    reactor, profile = made.ranks.transceivers[0]._reactor, cProfile.Profile()
    reactor.post(profile.enable)
    made.load()
    reactor.post(profile.disable)
    made.load()
    with path.open("w") as file:
        pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(45)


def measured(case: Case, gpus: Gpus, plan: Plan) -> list[Told]:
    """What `measure` told; RuntimeError if it ended without a word."""
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=measure, args=(theirs, case, gpus, plan))
    process.start()
    theirs.close()
    try:
        found: list[Told] = pipe.recv()
    except EOFError:
        raise RuntimeError(f"nothing was measured: {case}") from None
    finally:
        process.join()
    return found


def add_gpus(parser: argparse.ArgumentParser) -> None:
    """Where to measure."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", default="0,1", help="of the sender and of the receiver")


def gpus_of(options: argparse.Namespace) -> Gpus:
    """Those of sender and receiver, none on a CPU. Without two GPUs the program ends: nothing is measured."""
    from gpu_rows import num_gpus

    if options.device == "cpu":
        return None
    if num_gpus() < 2:
        print("not measured: this benchmark needs two GPUs of one host")
        raise SystemExit(0)
    sender, receiver = options.gpus.split(",")
    return sender, receiver


def main() -> None:
    from gpu_rows import Table, device_name

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_gpus(parser)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=["direct", "staged"])
    parser.add_argument("--link", type=float, default=372.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    gpus = gpus_of(options)
    paths = options.paths if gpus else [path for path in options.paths if path != "direct"]
    table = Table("in_flight", device_name(options.device))
    plan = Plan(tuple(options.requests), options.repeats, options.profile)
    for path in paths:
        case = Case(tokens=options.tokens, num_requests=max(options.requests), settings=PATHS[path])
        for told in measured(case, gpus, plan):
            assert told.paths == {path.split(",")[0]}, f"another path: wanted={path}, taken={told.paths}"
            bar = SHARE * options.link if path == "direct" and told.num_requests >= 64 else 0.0
            name = f"{path}, {told.num_requests} of {options.tokens} tokens at once"
            table.timed(name, case.num_bytes(told.num_requests), told.seconds, bar=bar)
            print(f"    stages of a request, ms: {told.stages}", flush=True)
            told.print_host()
    table.finish(options.out)


if __name__ == "__main__":
    main()
