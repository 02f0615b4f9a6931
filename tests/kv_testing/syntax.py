"""What Python sources define, read from their syntax: nothing is imported.

In:  a folder of packages; names of modules and classes.
Out: the names a module defines, the methods of a class with their parameters, the attributes it gives its objects.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Imported:
    """One name of a module that a file of ours asks for."""

    module: str
    name: str
    is_guarded: bool
    """Whether its absence is caught."""


class Source:
    """One file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tree = ast.parse(path.read_text())

    @cached_property
    def names(self) -> set[str]:
        """Whatever can be imported from it, also what is defined in one of several branches."""
        return {name for node in ast.walk(self._tree) if isinstance(node, ast.stmt) for name in _bound_by(node)}

    def class_named(self, name: str) -> ast.ClassDef:
        return next(node for node in ast.walk(self._tree) if isinstance(node, ast.ClassDef) and node.name == name)

    def imported_from(self, package: str) -> Iterator[Imported]:
        """Every `from <package>... import name`, wherever it stands."""
        guarded = {id(node) for attempt in ast.walk(self._tree) if _guards(attempt) for node in ast.walk(attempt)}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                yield from (Imported(node.module or "", each.name, id(node) in guarded) for each in node.names)


def module_at(folder: Path, name: str) -> Source | None:
    """The module of this dotted name below `folder`; None if there is none."""
    path = folder.joinpath(*name.split("."))
    candidates = [path.with_suffix(".py"), path / "__init__.py"]
    return next((Source(file) for file in candidates if file.is_file()), None)


def methods(of: ast.ClassDef) -> dict[str, FunctionDef]:
    return {node.name: node for node in of.body if isinstance(node, FunctionDef)}


def parameters(of: FunctionDef) -> list[str]:
    """Names in order, `*` and `**` with those that take any number."""
    spec = of.args
    plain = [each.arg for each in (*spec.posonlyargs, *spec.args)]
    rest = [f"*{spec.vararg.arg}"] if spec.vararg else []
    named = [each.arg for each in spec.kwonlyargs]
    return [*plain, *rest, *named, *([f"**{spec.kwarg.arg}"] if spec.kwarg else [])]


def is_decorated(of: FunctionDef, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in of.decorator_list)


def attributes(of: ast.ClassDef) -> set[str]:
    """Names in the body of the class, and those that its methods set on their object."""
    own = {name for node in of.body for name in _bound_by(node)}
    stored = {
        node.attr
        for node in ast.walk(of)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value)
    }
    return own | stored


def _bound_by(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {(each.asname or each.name).split(".")[0] for each in names}
        case ast.Assign(targets=targets):
            return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case _:
            return set()


def _guards(node: ast.AST) -> bool:
    return isinstance(node, ast.Try) and any("ImportError" in ast.dump(each) for each in node.handlers)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
