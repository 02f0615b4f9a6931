"""Cases as they stand in files: loading, compact lists written out, what a file may contain.

In:  a folder of JSON files, each a list of cases (format: cases/README.md).
Out: `Case` values.
Law: nothing is dropped: a case that cannot be understood becomes a case that fails.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UnknownKind(Exception):
    """The driver does not know this kind of case, function, target or operation."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case of one file; `content` is the JSON object with all compact lists written out."""

    file: str
    content: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.content.get("name", "?"))

    @property
    def kind(self) -> str:
        return str(self.content.get("kind", "?"))

    @property
    def is_heavy(self) -> bool:
        return bool(self.content.get("heavy", False))

    @property
    def is_uncertain(self) -> bool:
        return bool(self.content.get("uncertain", False))


def load_cases(folder: Path) -> list[Case]:
    """All cases of all JSON files in `folder`, files in order of their names."""
    return [case for path in sorted(folder.glob("*.json")) for case in _load_file(path)]


def _load_file(path: Path) -> list[Case]:
    try:
        contents = json.loads(path.read_text())
    except ValueError as error:
        return [Case(path.name, {"name": path.stem, "kind": f"unreadable: {error}"})]
    if not isinstance(contents, list):
        return [Case(path.name, {"name": path.stem, "kind": "a file that is no list"})]
    return [Case(path.name, written_out(content)) for content in contents]


def written_out(value: Any) -> Any:
    """`value` with {"range": [a, b]} and {"repeat": [v, n]} as plain lists, at any depth."""
    if isinstance(value, list):
        return [written_out(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"range"}:
        return list(range(*value["range"]))
    if set(value) == {"repeat"}:
        return [value["repeat"][0]] * value["repeat"][1]
    return {key: written_out(item) for key, item in value.items()}
