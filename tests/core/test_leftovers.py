"""Nothing in kv_core is left over: what is defined is used, what is stored is read (core spec D56)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "packages/kv-core/src/kv_core").glob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in (ROOT / "packages").glob("*/src/**/*.py")}
DOCUMENTED = re.findall(r"\w+", (ROOT / "docs/api.md").read_text())


def names_used(tree: ast.AST) -> Iterator[str]:
    """Every name that is read in a module: variables, attributes, imports, and keywords of calls."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                yield name
            case ast.ImportFrom(names=names):
                yield from (alias.name for alias in names)


USED = {path: set(names_used(tree)) for path, tree in TREES.items()}
READ = set().union(*USED.values())


def functions(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("__"):
            yield node.name


def slots(tree: ast.Module) -> Iterator[str]:
    """Attributes of the classes that keep state: their slots, or the fields of their dataclass or tuple."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=names)):
                yield from (ast.literal_eval(name) for name in names)
            case ast.ClassDef(body=body):
                fields = (one.target for one in body if isinstance(one, ast.AnnAssign))
                yield from (field.id for field in fields if isinstance(field, ast.Name))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_name_is_used(path):
    left_over = [name for name in functions(TREES[path]) if name not in READ and name not in DOCUMENTED]
    assert left_over == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_attribute_is_read(path):
    left_over = [name for name in slots(TREES[path]) if name not in READ and name not in DOCUMENTED]
    assert left_over == []
