"""Writes docs/settings.md: every key of `kv_connector_extra_config`, from the classes that read them.

In:  `FerryConfig`, `TierConfig` and `TransferConfig`: fields, defaults, ranges, and the words below each field.
Out: the page.
Law: the page is what this prints, and a test compares. A setting without words, or without a side, is an error.

Usage: .venv/bin/python tools/docs/settings.py
"""

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kv_engine_adapter.config import MAX_IDLE_WAIT_S, FerryConfig
from kv_engine_adapter.tier_config import TierConfig
from kv_transfer.config import RANGES, TransferConfig

FILE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
SIDES = {
    **dict.fromkeys(
        ("lease_s", "max_lease_s", "max_wait_s", "send_arena_bytes", "max_sessions", "share_in_place"), "prefill"
    ),
    **dict.fromkeys(
        (
            "renew_s",
            "release_deadline_s",
            "receive_arena_bytes",
            "unmap_idle_s",
            "layers_per_chunk",
            "own_blocks",
            "in_place_run_bytes",
            "peers",
            "idle_wait_s",
        ),
        "decode",
    ),
}
"""Who uses a setting; those that are not named are used by both."""
IN_CONNECTOR = {"own_blocks": "false only, since the blocks are the engine's"}
"""What the connector allows less than the transfer layer."""
LIST = "addresses, networks"


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the table."""

    key: str
    default: str
    unit: str
    range: str
    side: str
    meaning: str


def settings() -> list[Setting]:
    """All of them, in the order of the classes."""
    own = [each for each in _settings_of(FerryConfig) if each.key not in ("transfer", "tier")]
    return [*own, *_settings_of(TierConfig), *_settings_of(TransferConfig)]


def _settings_of(kind: type) -> Iterator[Setting]:
    words = _words_below(kind)
    for field in dataclasses.fields(kind):
        key, default = field.name, field.default
        yield Setting(
            key, _shown(key, default), _unit(key), _range(key), SIDES.get(key, "both"), _sentence(words[field.name])
        )


def _words_below(kind: type) -> dict[str, str]:
    """The string literal that follows each field in the source."""
    (body,) = [node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef)]
    found = {}
    for node, after in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr):
            found[node.target.id] = ast.literal_eval(after.value)
    return found


def _shown(key: str, default: Any) -> str:
    if default is dataclasses.MISSING:
        return "this machine" if key == "peers" else "required"
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return _number(default) if isinstance(default, int | float) else f"`{default}`"


def _unit(key: str) -> str:
    if key == "peers":
        return LIST
    return {"s": "s", "bytes": "bytes"}.get(key.rsplit("_", 1)[-1], "")


def _range(key: str) -> str:
    if key in IN_CONNECTOR:
        return IN_CONNECTOR[key]
    ranges = RANGES | {"idle_wait_s": (0, MAX_IDLE_WAIT_S)}
    if key not in ranges:
        return ""
    least, most = ranges[key]
    return f"{_number(least)} to {_number(most)}"


def _number(number: float) -> str:
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if number and isinstance(number, int) and not number % (1 << power):
            return f"{number >> power} {name}" if number != 1 << 20 else f"{number:,}"
    return f"{number:,g}" if isinstance(number, float) else f"{number:,}"


def _sentence(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")


def text() -> str:
    """The page."""
    rows = [f"| `{it.key}` | {it.default} | {it.unit} | {it.range} | {it.side} | {it.meaning} |" for it in settings()]
    return "\n".join(
        [
            "# Settings",
            "",
            "Every key of `kv_connector_extra_config`; an unknown key, a wrong type or a value out of range is refused",
            "at start, with both values. *Side*: the engines that use a setting, those that prefill or those that",
            "decode; an engine may do both. Made from the classes that read them: `python tools/docs/settings.py`.",
            "",
            "| key | default | unit | range | side | meaning |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    FILE.write_text(text())
