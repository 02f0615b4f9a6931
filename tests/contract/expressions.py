"""Expressions of deviation rules: a small part of Python, evaluated without reach into anything.

In:  the text of an expression, and the names it may use.
Out: its value.
Law: only literals, arithmetic, comparisons, choices, subscripts, comprehensions and calls of the given functions. No
     attributes, no assignments, no other names: an expression can read what it is given and nothing else.
"""

import ast
from collections.abc import Mapping
from typing import Any

_ALLOWED = (
    ast.Expression,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.Store,
    ast.BoolOp,
    ast.UnaryOp,
    ast.BinOp,
    ast.Compare,
    ast.IfExp,
    ast.Subscript,
    ast.Slice,
    ast.List,
    ast.Tuple,
    ast.Dict,
    ast.Set,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.comprehension,
    ast.Call,
    ast.keyword,
    ast.Starred,
    ast.boolop,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
)

_FUNCTIONS = {
    function.__name__: function
    for function in (abs, all, any, dict, enumerate, int, len, list, max, min, range, round, set, sorted, str, sum, zip)
}


class BadExpression(Exception):
    """The expression uses what it may not, or cannot be evaluated."""


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """The value of `text`, in which `names` and a few functions of Python are known."""
    tree = _parsed(text)
    scope = {"__builtins__": {}, **_FUNCTIONS, **names}
    try:
        return eval(compile(tree, "<rule>", "eval"), scope)
    except Exception as error:
        raise BadExpression(f"{text!r}: {type(error).__name__}: {error}") from error


def _parsed(text: str) -> ast.Expression:
    try:
        tree = ast.parse(f"({text.strip()})", "<rule>", "eval")
    except SyntaxError as error:
        raise BadExpression(f"{text!r}: {error}") from error
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise BadExpression(f"{text!r}: {type(node).__name__} is not allowed")
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            raise BadExpression(f"{text!r}: {node.id!r} is not allowed")
    return tree
