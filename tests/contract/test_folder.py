"""A folder of cases given on the command line: one line of JSON a case, and nothing that is not understood passes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PASSES: dict[str, Any] = {"name": "passes", "kind": "function", "fn": "get_sink_bubble_length"}
PASSES |= {"args": {"sink_token_length": 0, "tokens_per_block": 4}, "expect": 0}
CASES: dict[str, dict[str, Any]] = {
    "passes": PASSES,
    "fails": PASSES | {"expect": 1},
    "an unknown kind": PASSES | {"kind": "wish"},
    "an unknown function": PASSES | {"fn": "unheard_of"},
    "an unknown operation": {
        "kind": "scenario",
        "config": {"target": "eviction_policy", "num_primary_blocks": 1, "num_secondary_blocks": 0},
        "steps": [{"op": "unheard_of"}],
    },
    "long running": PASSES | {"heavy": True},
    "not certain": PASSES | {"expect": 1, "uncertain": True},
}


def run_on(folder, *options):
    """The exit status and the lines of a run on a folder, as the README of the cases says."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        HERE / "test_cases.py",
        "--cases",
        folder,
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    ended = subprocess.run([*command, *options], cwd=HERE.parents[1], capture_output=True, text=True)
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"case"')]
    return ended.returncode, {one["case"]: one for one in found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cases")
    named = [case | {"name": name} for name, case in CASES.items()]
    (path / "one.json").write_text(json.dumps(named[:3]))
    (path / "two.json").write_text(json.dumps(named[3:]))
    (path / "broken.json").write_text("{")
    return path


def test_every_case_has_its_line(folder):
    status, lines = run_on(folder)
    assert status == 1
    assert {name: line["status"] for name, line in lines.items()} == {
        "passes": "passed",
        "fails": "failed",
        "an unknown kind": "failed",
        "an unknown function": "failed",
        "an unknown operation": "failed",
        "long running": "pending",
        "not certain": "failed",
        "broken": "failed",
    }
    assert lines["an unknown operation"]["reason"] == "unknown operation 'unheard_of'"
    assert {line["file"] for line in lines.values()} == {"one.json", "two.json", "broken.json"}


def test_cases_that_run_for_long_belong_to_the_long_run(folder):
    status, lines = run_on(folder, "-m", "long")
    assert (status, list(lines), lines["long running"]["status"]) == (0, ["long running"], "passed")


def test_only_cases_that_are_certain_decide(tmp_path):
    kept = [CASES[name] | {"name": name} for name in ("passes", "not certain")]
    (tmp_path / "cases.json").write_text(json.dumps(kept))
    status, lines = run_on(tmp_path)
    assert (status, lines["not certain"]["status"]) == (0, "failed")


def test_a_folder_without_cases_is_an_error(tmp_path):
    status, lines = run_on(tmp_path / "nowhere")
    assert status not in (0, 1)
    assert not lines
