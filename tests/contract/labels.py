"""Names of blocks in events: what the cases call h0, h1, the models by content, and we by 256-bit keys.

In:  events as each of the three tells them.
Out: the same events, with one kind of name: a short digest of the block's chain of contents.
Law: one key is one name and one name one key, within a window and over the whole case. A label is bound to the name
     that stands in its place in the seed's events, or in ours where there is no model, and keeps it.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

from contract.seed_model import Key
from kv_core.events import Change, Created, Event, Removed, Reset, Stored, StoredBlock, Updated
from kv_core.keys import BlockKey, Scope

Told = dict[str, Any]


def short(name: Any) -> str | None:
    """A model's name, shortened."""
    return None if name is None else sha256(repr(name).encode()).hexdigest()[:8]


def shortened(events: Sequence[Told]) -> list[Told]:
    """A model's events with short names."""
    return [_renamed(event, short) for event in events]


class Names:
    """Names of one case, over all windows."""

    def __init__(self) -> None:
        self._chains: dict[tuple[int, BlockKey], Any] = {}
        self._keys: dict[tuple[int, str], BlockKey] = {}
        self._labels: dict[tuple[int, str], str] = {}

    def expected(self, events: Sequence[Told], like: Sequence[Told]) -> list[Told]:
        """A case's events with names; labels not seen before take those of `like`, place by place."""
        for theirs, named in zip(events, like, strict=False):
            for label, name in zip(_names_of(theirs), _names_of(named), strict=False):
                if label is not None and name is not None and name not in self._names(theirs["window"]):
                    self._labels.setdefault((theirs["window"], label), name)
        return [
            _renamed(event, lambda label, window=event["window"]: label and self._labels.get((window, label), label))
            for event in events
        ]

    def _names(self, window: int) -> set[str]:
        return {name for (where, _), name in self._labels.items() if where == window}

    def ours(self, events: Sequence[Event]) -> list[Told]:
        """Our events in the form of the cases."""
        return [self._told(event) for event in events]

    def _told(self, event: Event) -> Told:
        told: Told = {"window": event.window, "event_id": event.event_id}
        payload = event.payload
        match payload:
            case Created():
                told |= {"type": "created", "num_blocks_per_cache_level": list(payload.num_blocks[:2])}
            case Stored():
                told |= {"type": "stored", "parent": self._name(event.window, payload.parent)}
                told["blocks"] = list(self._blocks(event.window, payload))
            case Removed():
                told |= {"type": "removed", "hashes": [self._name(event.window, key) for key in payload.keys]}
            case Updated():
                told |= {"type": "updated", "hash": self._name(event.window, payload.key)}
                told |= _changes(cache_level=payload.tier, priority=payload.priority)
            case Reset():
                told |= {"type": "reset", "num_lost": payload.num_lost}
        return told

    def _blocks(self, window: int, stored: Stored) -> Iterator[Told]:
        chain = self._chains.get((window, stored.parent)) if stored.parent is not None else None
        for block in stored.blocks:
            chain = (chain, _content(stored.scope, block))
            self._chains[window, block.key] = chain
            yield {
                "hash": self._name(window, block.key),
                "tokens": list(block.tokens),
                "lora_id": None if stored.scope.lora is None else int(stored.scope.lora),
                "cache_level": block.tier,
                "priority": block.priority,
            }

    def _name(self, window: int, key: BlockKey | None) -> str | None:
        if key is None:
            return None
        name = short(self._chains.get((window, key), key.hex())) or ""
        # Another key for the same content would be told apart here.
        return name if self._keys.setdefault((window, name), key) == key else f"{name} again"


def _content(scope: Scope, block: StoredBlock) -> Key:
    extra_ids = block.extra_ids or (0,) * len(block.tokens)
    tokens = tuple(zip(block.tokens, extra_ids, strict=True))
    lora, salt = (None if text is None else int(text) for text in (scope.lora, scope.salt))
    return Key(block.extra_ids is not None, lora, salt, (), tokens)


def _changes(**changes: Change | None) -> dict[str, dict[str, int]]:
    return {name: {"old": change.old, "new": change.new} for name, change in changes.items() if change is not None}


def _names_of(event: Mapping[str, Any]) -> list[str | None]:
    blocks = [block["hash"] for block in event.get("blocks", ())]
    return [event.get("parent"), event.get("hash"), *event.get("hashes", ()), *blocks]


def _renamed(event: Told, rename: Any) -> Told:
    told = dict(event)
    for field in {"parent", "hash"} & told.keys():
        told[field] = rename(told[field])
    if "hashes" in told:
        told["hashes"] = [rename(name) for name in told["hashes"]]
    if "blocks" in told:
        told["blocks"] = [block | {"hash": rename(block["hash"])} for block in told["blocks"]]
    return told
