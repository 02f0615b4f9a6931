"""Events as JSON objects, in the form that routers of the seed's period read (core spec 12.1, D22, D52).

In:  events of one manager, in order; how blocks are called.
Out: one JSON-ready dict an event.
Law: what identifies content is told: adapter, salt and items of a stored chain. A difference that is not there is null.

    {"event_id": 7, "window_size": 4096, "attention_dp_rank": 0, "data": {"type": "stored", ...}}

Blocks are called by their 256-bit keys in hex, or by the seed's 64-bit hashes for consumers that still want those.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

from kv_core.content import BlockContent, ItemPart
from kv_core.errors import CallerError
from kv_core.events import Change, Created, Event, Removed, Reset, Stored, StoredBlock, Updated
from kv_core.keys import BlockKey, Scope
from kv_core.seed_hash import NO_PARENT, seed_hash

Json = dict[str, Any]


class BlockNames(Protocol):
    """How blocks are called in JSON. Sees every event before its blocks are named, and after it what is gone."""

    def stored(self, window: int, event: Stored) -> None: ...

    def name(self, window: int, key: BlockKey, /) -> str | int: ...

    def removed(self, window: int, event: Removed) -> None: ...


class HexNames:
    """256-bit keys in hex."""

    def stored(self, window: int, event: Stored) -> None:
        """Nothing to remember."""

    def name(self, _window: int, key: BlockKey, /) -> str | int:
        return key.hex()

    def removed(self, window: int, event: Removed) -> None:
        """Nothing to forget."""


class _Told(NamedTuple):
    """A block that was told: its hash, how many tokens end with it, and the items that go on behind them."""

    hash: int
    stop: int
    items: tuple[tuple[bytes, int], ...]


_START: Final = _Told(NO_PARENT, 0, ())


class SeedNames:
    """The seed's 64-bit hashes, bit for bit, from the content that stored events tell.

    Adapter and salt have to be numbers, as they were there. How many tokens a multimodal item covers is not told:
    `item_lengths` says it, by digest. Items enter a hash in the order of their first tokens. CallerError for what is no
    number, for an item of unknown length and for a block whose parent was never told.
    """

    def __init__(self, item_lengths: Mapping[bytes, int] | None = None) -> None:
        self._item_lengths = {} if item_lengths is None else item_lengths
        self._told: dict[tuple[int, BlockKey], _Told] = {}

    def stored(self, window: int, event: Stored) -> None:
        before = _START if event.parent is None else self._known(window, event.parent)
        for block in event.blocks:
            before = self._next(before, event.scope, block)
            self._told[window, block.key] = before

    def name(self, window: int, key: BlockKey, /) -> str | int:
        return self._known(window, key).hash

    def removed(self, window: int, event: Removed) -> None:
        for key in event.keys:
            self._told.pop((window, key), None)

    def _next(self, before: _Told, scope: Scope, block: StoredBlock) -> _Told:
        start, stop = before.stop, before.stop + len(block.tokens)
        items = (*before.items, *(item for item in scope.extras if start <= item[1] < stop))
        parts = tuple(ItemPart(digest, max(0, start - first)) for digest, first in items)
        lora, salt = _number("lora", scope.lora), _number("salt", scope.salt)
        content = BlockContent(block.tokens, block.extra_ids, lora, salt, parts)
        behind = tuple((digest, first) for digest, first in items if first + self._length(digest) > stop)
        return _Told(seed_hash(content, before.hash), stop, behind)

    def _length(self, digest: bytes) -> int:
        if digest not in self._item_lengths:
            raise CallerError(f"64-bit hashes of multimodal items need their lengths: digest={digest.hex()}")
        return self._item_lengths[digest]

    def _known(self, window: int, key: BlockKey) -> _Told:
        if (window, key) not in self._told:
            raise CallerError(f"no stored event told of this block: window={window}, key={key.hex()}")
        return self._told[window, key]


def events_to_json(events: Iterable[Event], names: BlockNames | None = None) -> Iterator[Json]:
    """The events in order. `names` (hex keys when None) is kept over calls by who reads one manager's stream."""
    names = HexNames() if names is None else names
    for event in events:
        if isinstance(event.payload, Stored):
            names.stored(event.window, event.payload)
        told: Json = {"event_id": event.event_id, "window_size": event.window, "data": _payload(event, names)}
        if event.rank is not None:
            told["attention_dp_rank"] = event.rank
        if isinstance(event.payload, Removed):
            names.removed(event.window, event.payload)
        yield told


def _payload(event: Event, names: BlockNames) -> Json:
    payload, window = event.payload, event.window
    match payload:
        case Created():
            return {"type": "created", "num_blocks_per_cache_level": list(payload.num_blocks)}
        case Stored():
            return _stored(window, payload, names)
        case Removed():
            return {"type": "removed", "block_hashes": [names.name(window, key) for key in payload.keys]}
        case Updated():
            diffs = {"cache_level": _diff(payload.tier), "priority": _diff(payload.priority)}
            return {"type": "updated", "block_hash": names.name(window, payload.key)} | diffs
        case Reset():
            return {"type": "reset", "num_lost_events": payload.num_lost}


def _stored(window: int, event: Stored, names: BlockNames) -> Json:
    return {
        "type": "stored",
        "parent_hash": None if event.parent is None else names.name(window, event.parent),
        "lora_id": event.scope.lora,
        "cache_salt": event.scope.salt,
        "mm_keys": [{"hash": digest.hex(), "start_token": start} for digest, start in event.scope.extras],
        "blocks": [_block(window, block, names) for block in event.blocks],
    }


def _block(window: int, block: StoredBlock, names: BlockNames) -> Json:
    extra_ids = block.extra_ids or (0,) * len(block.tokens)
    return {
        "type": "stored_block",
        "block_hash": names.name(window, block.key),
        "tokens": [
            {"type": "unique_token", "token_id": token, "token_extra_id": extra_id}
            for token, extra_id in zip(block.tokens, extra_ids, strict=True)
        ],
        "cache_level": block.tier,
        "priority": block.priority,
    }


def _diff(change: Change | None) -> Json | None:
    return None if change is None else {"type": "event_diff", "new_value": change.new, "old_value": change.old}


def _number(name: str, text: str | None) -> int | None:
    if text is not None and not text.isdecimal():
        raise CallerError(f"64-bit hashes take numbers: {name}={text!r}")
    return None if text is None else int(text)
