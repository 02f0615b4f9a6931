"""Hashes of events as the cases name them: labels, bound when they first appear.

In:  expected events with labels and ours with keys, window by window.
Out: our events, with labels in place of keys.
Law: one label is one key and one key is one label, within a window and over the whole case.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kv_core.events import Change, Created, Event, Removed, Reset, Stored, StoredBlock, Updated
from kv_core.keys import BlockKey


class Labels:
    """Labels of all windows."""

    def __init__(self) -> None:
        self._keys: dict[int, dict[str, BlockKey]] = {}
        self._labels: dict[int, dict[BlockKey, str]] = {}

    def told(self, events: list[Event], expected: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`events` in the form of the cases; labels of `expected` are bound where ours stands in their place."""
        pairs = zip(events, expected, strict=False)
        for ours, theirs in pairs:
            self._bind(ours, theirs)
        return [self._told(event) for event in events]

    def _bind(self, ours: Event, theirs: Mapping[str, Any]) -> None:
        by_label = self._keys.setdefault(ours.window, {})
        by_key = self._labels.setdefault(ours.window, {})
        for label, key in _pairs(ours.payload, theirs):
            if label is not None and key is not None and label not in by_label and key not in by_key:
                by_label[label], by_key[key] = key, label

    def _label(self, window: int, key: BlockKey | None) -> str | None:
        return None if key is None else self._labels.get(window, {}).get(key, f"unbound {key.hex()[:8]}")

    def _told(self, event: Event) -> dict[str, Any]:
        told: dict[str, Any] = {"window": event.window, "event_id": event.event_id}
        payload = event.payload
        if isinstance(payload, Created):
            told |= {"type": "created", "num_blocks_per_cache_level": list(payload.num_blocks[:2])}
        elif isinstance(payload, Stored):
            blocks = [self._block(event.window, payload, block) for block in payload.blocks]
            told |= {"type": "stored", "parent": self._label(event.window, payload.parent), "blocks": blocks}
        elif isinstance(payload, Removed):
            told |= {"type": "removed", "hashes": [self._label(event.window, key) for key in payload.keys]}
        elif isinstance(payload, Updated):
            told |= {"type": "updated", "hash": self._label(event.window, payload.key)}
            told |= _changes(cache_level=payload.tier, priority=payload.priority)
        elif isinstance(payload, Reset):
            told |= {"type": "reset", "num_lost": payload.num_lost}
        return told

    def _block(self, window: int, stored: Stored, block: StoredBlock) -> dict[str, Any]:
        told = {
            "hash": self._label(window, block.key),
            "tokens": list(block.tokens),
            "lora_id": None if stored.scope.lora is None else int(stored.scope.lora),
            "cache_level": block.tier,
            "priority": block.priority,
        }
        return told | ({"extra_ids": list(block.extra_ids)} if block.extra_ids is not None else {})


def _changes(**changes: Change | None) -> dict[str, dict[str, int]]:
    return {name: {"old": change.old, "new": change.new} for name, change in changes.items() if change is not None}


def _pairs(payload: object, theirs: Mapping[str, Any]) -> Iterator[tuple[str | None, BlockKey | None]]:
    """Labels beside the keys that stand in the same place."""
    if isinstance(payload, Stored):
        yield theirs.get("parent"), payload.parent
        yield from zip((b["hash"] for b in theirs.get("blocks", ())), (b.key for b in payload.blocks), strict=False)
    elif isinstance(payload, Removed):
        yield from zip(theirs.get("hashes", ()), payload.keys, strict=False)
    elif isinstance(payload, Updated):
        yield theirs.get("hash"), payload.key
