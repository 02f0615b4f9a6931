"""Every known defect of the seed is proven by tests that are there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/decisions/core-defects.md").read_text()
ROWS = dict(re.findall(r"^\| D(\d+) [^|]*\|[^|]*\| ([^|]*) \|$", PAGE, re.MULTILINE))
NAMED = re.compile(r"`([\w/]+\.py)`|`(test_\w+)`")


def proofs(cell):
    """The tests of one row, as (file, function)."""
    path = "test_defects.py"
    for named_path, function in NAMED.findall(cell):
        if named_path:
            path = named_path
        else:
            yield ROOT / ("" if "/" in path else "tests/core") / path, function


def test_every_defect_has_its_row():
    assert [int(number) for number in ROWS] == list(range(1, 65))


@pytest.mark.parametrize("number", ROWS)
def test_the_proofs_of_a_defect_exist(number):
    named = list(proofs(ROWS[number]))
    assert named, f"D{number} names no test"
    for path, function in named:
        defined = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert function in defined, f"D{number}: no {function} in {path.name}"
