"""Plays all scenarios, or those whose names contain a word, and prints what came of each.

Usage: .venv/bin/python examples/paged_engine/run.py [--only WORD] [--device cuda] [--seed 0]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tools")]  # so that it runs as a script

from model.make_tiny import make_tiny  # noqa: E402

from paged_engine.llama import Llama  # noqa: E402
from paged_engine.scenarios import ADAPTERS, SCENARIOS, Played, play  # noqa: E402

COLUMNS = "{:<36} {:>7} {:>5} {:>5} {:>7} {:>7} {:>7} {:>7} {:>7} {:>6}"


def main() -> None:
    parser = argparse.ArgumentParser(description="A paged-attention generator in which kv_core owns every block.")
    parser.add_argument("--only", default="", help="scenarios whose names contain this")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the jobs")
    arguments = parser.parse_args()
    directory = make_tiny()
    print(
        COLUMNS.format("scenario", "answers", "ties", "wrong", "cached", "dropped", "copies", "rewound", "again", "s")
    )
    failed = []
    for scenario in SCENARIOS:
        if arguments.only in scenario.name:
            begin = time.perf_counter()
            model = Llama(directory, scenario.windows, device=arguments.device, adapters=ADAPTERS)
            with tempfile.TemporaryDirectory() as scratch:
                played = play(scenario, model, Path(scratch), arguments.seed)
            print(_row(scenario.name, played, time.perf_counter() - begin))
            print(*played.verdict.wrong, sep="\n", end="\n" if played.verdict.wrong else "")
            if not played.verdict.is_right or not scenario.happened(played):
                failed.append(scenario.name)
    print("right" if not failed else f"FAILED: {', '.join(failed)}")
    sys.exit(bool(failed))


def _row(name: str, played: Played, seconds: float) -> str:
    verdict, totals = played.verdict, played.totals
    cached = f"{played.stats.token_hit_rate:.0%}"
    return COLUMNS.format(
        name,
        verdict.num_answers,
        verdict.num_ties,
        len(verdict.wrong),
        cached,
        played.total("num_dropped"),
        sum(played.moves.values()),
        totals.num_rewound,
        totals.num_preempted + totals.num_lost,
        f"{seconds:.1f}",
    )


if __name__ == "__main__":
    main()
