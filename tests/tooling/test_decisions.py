"""Every known defect of the seed is proven by tests that are there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`([\w/]+\.py)`|`(test_\w+)`")
TRANSFER = {"A": 15, "B": 12, "C": 11, "D": 15, "E": 22, "F": 4, "G": 11, "H": 4, "I": 4, "J": 4}
PAGES = {
    "core": [f"D{number}" for number in range(1, 65)],
    "transfer": [f"{letter}{number}" for letter, count in TRANSFER.items() for number in range(1, count + 1)] + ["K"],
}


def rows(page):
    """The last cell of each row, by the defect that begins the first."""
    text = (ROOT / f"docs/decisions/{page}-defects.md").read_text()
    return re.findall(r"^\| ([A-K]\d*) [^|]*\|[^|]*\| ([^|]*) \|$", text, re.MULTILINE)


def proofs(page, cell):
    """The tests of one row, as (file, function)."""
    path = "test_defects.py"
    for named_path, function in NAMED.findall(cell):
        if named_path:
            path = named_path
        else:
            yield ROOT / ("" if path.startswith("tests/") else f"tests/{page}") / path, function


@pytest.mark.parametrize("page", PAGES)
def test_every_defect_has_its_row(page):
    assert [defect for defect, _ in rows(page)] == PAGES[page]


@pytest.mark.parametrize(("page", "defect", "cell"), [(page, *row) for page in PAGES for row in rows(page)])
def test_the_proofs_of_a_defect_exist(page, defect, cell):
    named = list(proofs(page, cell))
    assert named, f"{defect} names no test"
    for path, function in named:
        defined = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert function in defined, f"{defect}: no {function} in {path.name}"
