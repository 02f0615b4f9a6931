"""Runs the long versions of tests with a fixed seed and writes what they did to docs/evidence/.

In:  a seed, and the tests marked `long`.
Out: docs/evidence/long-<date>-<commit>.md with seed, counts, durations, commit and machine; pytest's exit status.
Law: the summary is written from pytest's own report, whether the tests passed or not.

Usage: .venv/bin/python tools/run_long.py [--seed 0] [PATH ...]     (or `make test-long SEED=0 ONLY="PATH ..."`)
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one test ended, and what it recorded about itself with pytest's `record_property`."""

    name: str
    verdict: str
    seconds: float
    notes: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the long versions of tests and write their summary.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("paths", nargs="*", help="folders or files of tests; all of them if none is named")
    arguments = parser.parse_args()
    seed, paths = arguments.seed, tuple(arguments.paths)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        status = run(seed, paths, report)
        outcomes = read(report) if report.exists() else []
    if outcomes:
        print(f"summary: {write_summary(seed, paths, outcomes).relative_to(ROOT)}")
    sys.exit(status)


def run(seed: int, paths: tuple[str, ...], report: Path) -> int:
    """Pytest's exit status; tests find the seed in KVFERRY_SEED, Hypothesis gets it as its own."""
    command = [sys.executable, "-m", "pytest", "-m", "long and not gpu and not multi_gpu", f"--timeout={TIMEOUT_S}"]
    command += ["--hypothesis-profile=drawn", f"--hypothesis-seed={seed}", f"--junitxml={report}", *paths]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"KVFERRY_SEED": str(seed)}).returncode


def read(report: Path) -> list[Outcome]:
    return [_outcome(case) for case in ET.parse(report).getroot().iter("testcase")]


def _outcome(case: ET.Element) -> Outcome:
    verdict = next((tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None), "passed")
    notes = tuple(f"{it.get('name')}={it.get('value')}" for it in case.iter("property"))
    name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
    return Outcome(name, verdict, float(case.get("time", "0")), notes)


def write_summary(seed: int, paths: tuple[str, ...], outcomes: list[Outcome]) -> Path:
    now, commit = datetime.now(UTC), tested_commit()
    target = EVIDENCE / f"long-{now:%Y-%m-%d}-{commit}.md"
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    target.write_text(summary(seed, paths, outcomes, commit, now))
    return target


def summary(seed: int, paths: tuple[str, ...], outcomes: list[Outcome], commit: str, now: datetime) -> str:
    """The page: one line on the run, then one row a test."""
    verdicts = ", ".join(
        f"{count} {verdict}" for verdict, count in sorted(Counter(it.verdict for it in outcomes).items())
    )
    seconds = sum(it.seconds for it in outcomes)
    only = f' ONLY="{" ".join(paths)}"' if paths else ""
    rows = [f"| {it.name} | {it.verdict} | {it.seconds:.1f} | {' '.join(it.notes)} |" for it in outcomes]
    return "\n".join(
        [
            f"# Long tests of {now:%Y-%m-%d}",
            "",
            f"`make test-long SEED={seed}{only}` at commit {commit}: {verdicts}, {seconds:.0f} s in tests.",
            f"Machine: {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}.",
            "",
            "| test | verdict | seconds | recorded |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def tested_commit() -> str:
    """The short commit id, with `-dirty` when tracked files differ from it."""
    words = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
