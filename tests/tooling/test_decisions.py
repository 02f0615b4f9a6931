"""Every known defect, acceptance check, bug report and refusal of vLLM's connector is proven by tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`([\w/]+\.py)`|`(test_\w+)`")
TRANSFER = {"A": 15, "B": 12, "C": 11, "D": 15, "E": 22, "F": 4, "G": 11, "H": 4, "I": 4, "J": 4}
ACCEPTANCE = {1: "abcdef", 2: "ab", 3: "ab", 5: "abc", 7: "abcdef", 8: "ab", 10: "ab", 11: "abcdef", 12: "abcd"}
"""The parts of each acceptance check that has any."""
PAGES = {
    "core-defects": [f"D{number}" for number in range(1, 65)],
    "transfer-defects": [f"{letter}{number}" for letter, count in TRANSFER.items() for number in range(1, count + 1)]
    + ["K"],
    "transfer-acceptance": [f"{check}{part}" for check in range(1, 15) for part in ACCEPTANCE.get(check, ("",))]
    + [f"BR-{number}" for number in (20, *range(22, 30))],
    "peer-refusals": [str(number) for number in range(1, 44)],
}
CORE_REPORTS = (1, 2, 4, 6, 7, 9, 10, 12, 14, 17, 18, 19)
"""Public bug reports that concern the cache manager, by their BR numbers."""
FOLDERS = {
    "core-defects": ("tests/core", ""),
    "transfer-defects": ("tests/transfer", "test_defects.py"),
    "transfer-acceptance": ("tests/transfer", "test_bug_reports.py"),
    "peer-refusals": ("tests/transfer/sessions", "test_peer_refusals.py"),
}
"""Where the tests of a page are: the folder of files without one, and the file of tests without one."""


def rows(page):
    """The last cell of each row, by the defect that begins the first."""
    text = (ROOT / f"docs/decisions/{page}.md").read_text()
    return re.findall(r"^\| ([A-K]\d*|\d+[a-f]?|BR-\d+) [^\n]*\| ([^|]*) \|$", text, re.MULTILINE)


def proofs(page, cell):
    """The tests of one row, as (file, function)."""
    folder, path = FOLDERS[page]
    for named_path, function in NAMED.findall(cell):
        if named_path:
            path = named_path
        else:
            assert path, f"no file is named for {function}"
            yield ROOT / ("" if path.startswith("tests/") else folder) / path, function


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


@pytest.mark.parametrize("report", CORE_REPORTS)
def test_every_bug_report_about_the_manager_has_its_test(report):
    functions = re.findall(r"^def test_br_(\d+)_", (ROOT / "tests/core/test_bug_reports.py").read_text(), re.MULTILINE)
    assert f"{report:02}" in functions


def test_every_test_of_a_refusal_is_named_in_its_row():
    """A test is named after its row (`test_row_08_...`), or after several (`test_rows_01_to_04_...`)."""
    named = {
        (defect, function) for defect, cell in rows("peer-refusals") for _, function in proofs("peer-refusals", cell)
    }
    sessions = ROOT / "tests/transfer/sessions"
    files = (sessions / "test_peer_refusals.py", sessions / "test_told_refusals.py")
    for path in (*files, ROOT / "tests/adapter/test_peer_refusals.py"):
        for function in re.findall(r"^def (test_rows?_\w+)", path.read_text(), re.MULTILINE):
            assert (str(int(function.split("_")[2])), function) in named, f"{path.name}: {function}"


def test_the_tests_that_the_readme_names_exist():
    """Each row of its table of cache groups names files of tests, and tests in the file before them."""
    table = re.findall(r"^\| [^\n]*`tests/[^\n]*\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(table) >= 8
    for row in table:
        for path, function in _named(row):
            defined = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
            assert not function or function in defined, f"no {function} in {path.name}"


def _named(row):
    path = None
    for named_path, function in NAMED.findall(row):
        path = ROOT / named_path if named_path else path
        assert path is not None, f"a test without its file: {row}"
        yield path, function
