"""What happened to the cache, for readers outside of the engine's thread (core spec 12).

In:  changes, from the engine's thread; calls to `flush` once a step.
Out: events, taken by any thread.
Law: replaying all events gives the blocks of the tree with their tier and priority. Event ids count over all windows.
     Memory is bounded: what does not fit is dropped as a whole and a `Reset` stands in its place, after which a reader
     needs a snapshot (core spec D52).
"""

from dataclasses import dataclass
from typing import NamedTuple

from kv_core.keys import BlockKey, Scope


class Change(NamedTuple):
    """A value before and after."""

    old: int
    new: int


class StoredBlock(NamedTuple):
    """One block that entered the tree; its parent is the block before it in the event."""

    key: BlockKey
    tokens: tuple[int, ...]
    extra_ids: tuple[int, ...] | None
    tier: int
    priority: int


@dataclass(frozen=True, slots=True)
class Created:
    """A window has this many blocks in each tier."""

    num_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A chain of blocks entered the tree under `parent` (None: the root of `scope`)."""

    parent: BlockKey | None
    scope: Scope
    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks left the tree, children before their parents."""

    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Updated:
    """A block of the tree changed its tier or its priority; what did not change is None."""

    key: BlockKey
    tier: Change | None = None
    priority: Change | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """Events before this one were lost; only a snapshot tells what the cache holds."""

    num_lost: int


Payload = Created | Stored | Removed | Updated | Reset


@dataclass(frozen=True, slots=True)
class Event:
    """One change in one window; `event_id` counts over all windows, `rank` is the attention-DP rank if any."""

    event_id: int
    window: int
    payload: Payload
    rank: int | None = None
