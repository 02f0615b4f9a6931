"""Runs every cell of the matrix (versions of vLLM, models, switches) and writes the verdicts to docs/evidence/.

In:  tests/e2e/test_matrix.py; perhaps an expression (pytest's -k) that chooses among its cells.
Out: docs/evidence/matrix-<date>-<commit>.md with commit, versions and a verdict for each cell; pytest's exit status.
Law: every cell has its row, those that have not been run too, and so has what is refused.

Usage: .venv/bin/python tools/run_matrix.py [--only EXPRESSION]     (or `make test-matrix ONLY=EXPRESSION`)
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]  # so that it runs as a script

from run_long import EVIDENCE, Outcome, read, tested_commit  # noqa: E402

from kv_testing.cells import CELLS, OTHERS, REFUSED, Cell  # noqa: E402

TESTS = "tests/e2e/test_matrix.py"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the matrix of versions, models and switches; write its page.")
    parser.add_argument("--only", default="", help="an expression of pytest's -k that chooses cells")
    only = parser.parse_args().only
    now, tested = datetime.now(UTC), tested_commit()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        words = [sys.executable, "-m", "pytest", TESTS, "-m", "vllm", f"--junitxml={report}", "-v"]
        status = subprocess.run([*words, *(["-k", only] if only else [])], cwd=ROOT).returncode
        outcomes = {name: each for each in read(report) if (name := _case(each.name))} if report.exists() else {}
    if outcomes:
        target = EVIDENCE / f"matrix-{now:%Y-%m-%d}-{tested}.md"
        target.write_text(page(outcomes, only, tested, now))
        print(f"page: {target.relative_to(ROOT)}")
    sys.exit(status)


def page(outcomes: Mapping[str, Outcome], only: str, tested: str, now: datetime) -> str:
    """One line on the run, a row for each cell, then what is refused."""
    verdicts = [_verdict(outcomes, str(cell)) for cell in (*CELLS, *OTHERS)]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(Counter(verdicts).items()))
    chosen = f' ONLY="{only}"' if only else ""
    refused = [(f"{it.vllm}-{it.model}", it) for it in REFUSED]
    return "\n".join(
        [
            f"# Matrix of {now:%Y-%m-%d}",
            "",
            f"`make test-matrix{chosen}` at commit {tested}: {counts}.",
            f"torch {version('torch')}, NIXL {version('nixl')}, vLLM for CPUs in the versions below.",
            f"Machine: {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}.",
            "",
            "What a cell shows: `tests/e2e/test_matrix.py`; the models: `tools/model/make_tiny.py`. The second child",
            "of MultiConnector is vLLM's ExampleConnector.",
            "",
            "| vLLM | model | connector | prefixes cached | chunked prefill | n-gram | verdict | seconds | seen |",
            "|---|---|---|---|---|---|---|---|---|",
            *(
                _row(cell, outcomes.get(str(cell)), verdict)
                for cell, verdict in zip((*CELLS, *OTHERS), verdicts, strict=True)
            ),
            "",
            "Left out, since it is refused:",
            "",
            "| vLLM | model | asked for | by | words | seen |",
            "|---|---|---|---|---|---|",
            *(
                f"| {it.vllm} | {it.model} | {' '.join(it.asked) or 'a start'} | {it.by} | {it.words} "
                f"| {_verdict(outcomes, name)} |"
                for name, it in refused
            ),
            "",
        ]
    )


def _row(cell: Cell, outcome: Outcome | None, verdict: str) -> str:
    switches = [cell.keeps_prefixes, cell.chunks_prompts, cell.speculates]
    words: Sequence[str] = [
        cell.vllm,
        cell.model,
        "MultiConnector" if cell.is_child else "alone",
        *("on" if switch else "off" for switch in switches),
        verdict,
        "" if outcome is None else f"{outcome.seconds:.0f}",
        "" if outcome is None else " ".join(outcome.notes),
    ]
    return f"| {' | '.join(words)} |"


def _verdict(outcomes: Mapping[str, Outcome], name: str) -> str:
    return outcomes[name].verdict if name in outcomes else "not run"


def _case(test: str) -> str:
    """What stands in the brackets of a test's name; the empty string where nothing does."""
    found = re.search(r"\[(.+)\]$", test)
    return found[1] if found else ""


if __name__ == "__main__":
    main()
