"""What happened to the cache, as values for readers outside of the engine's thread (core spec 12).

In:  changes of the tree.
Out: `Event` values.
Law: replaying all events gives the blocks of the tree with their tier and priority. Event ids count over all windows.
     After a `Reset` a reader needs a snapshot (core spec D52).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kv_core.keys import BlockKey, Scope
from kv_core.token_log import unpacked


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


class StoredPiece(NamedTuple):
    """Consecutive blocks that entered the tree with one tier and priority; `content` holds `width` bytes a token."""

    keys: tuple[BlockKey, ...]
    content: bytes
    width: int
    tokens_per_block: int
    tier: int
    priority: int

    def blocks(self) -> Iterator[StoredBlock]:
        """The blocks one by one."""
        size = self.tokens_per_block * self.width
        for at, key in enumerate(self.keys):
            tokens, extra_ids = unpacked(self.content[at * size : (at + 1) * size], self.width)
            yield StoredBlock(key, tokens, extra_ids, self.tier, self.priority)


@dataclass(frozen=True, slots=True)
class Stored:
    """A chain of blocks entered the tree under `parent` (None: the root of `scope`).

    `scope` has the multimodal items that start in these blocks; those that started before are told with the blocks
    before. So each key follows from what is told (`kv_core.keys.chain_keys`).
    The pieces are what the engine's thread has at hand; `blocks` spells them out, at the cost of whoever reads.
    """

    parent: BlockKey | None
    scope: Scope
    pieces: tuple[StoredPiece, ...]

    @property
    def blocks(self) -> tuple[StoredBlock, ...]:
        """The blocks of the chain, first block first."""
        return tuple(block for piece in self.pieces for block in piece.blocks())


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
