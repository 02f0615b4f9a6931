"""Cuts a movement into posts of bounded size.

In:  pairs of equally long slices, and the most bytes that one post may move.
Out: pieces, in order; one piece is one post.
Law: every byte of the pairs lies in exactly one piece; a piece moves at most `max_post_bytes`, between one kind of
     memory on our side and one on theirs.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from kv_core.errors import CallerError
from kv_transfer.agent.base import Direction, Pair
from kv_transfer.agent.cards import MemoryKind
from kv_transfer.regions import Region


@dataclass(frozen=True, slots=True)
class Move:
    """`num_bytes` bytes between two addresses, each in the address space of its own side's device."""

    our_address: int
    their_address: int
    num_bytes: int
    our_device: int
    their_device: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one post moves."""

    direction: Direction
    our_kind: MemoryKind
    their_kind: MemoryKind
    moves: tuple[Move, ...]

    @property
    def num_bytes(self) -> int:
        return sum(move.num_bytes for move in self.moves)


def cut(direction: Direction, pairs: Sequence[Pair], max_post_bytes: int) -> tuple[Piece, ...]:
    """The pieces of a movement: a large pair is split, small neighbours of the same kinds share a post."""
    pieces: list[Piece] = []
    kinds: tuple[MemoryKind, MemoryKind] | None = None
    gathered: list[Move] = []
    room = 0
    for pair in pairs:
        for move in _moves(pair, max_post_bytes):
            if kinds is not None and (kinds != _kinds(pair) or move.num_bytes > room):
                pieces.append(Piece(direction, *kinds, tuple(gathered)))
                kinds = None
            if kinds is None:
                kinds, gathered, room = _kinds(pair), [], max_post_bytes
            gathered.append(move)
            room -= move.num_bytes
    if kinds is not None:
        pieces.append(Piece(direction, *kinds, tuple(gathered)))
    return tuple(pieces)


def check_pairs(pairs: Sequence[Pair], registered: Set[Region]) -> None:
    """Raises CallerError unless there are pairs, each of equally long slices, ours in a registered region."""
    if not pairs:
        raise CallerError("a movement has at least one pair of slices")
    for ours, theirs in pairs:
        if ours.num_bytes != theirs.num_bytes:
            raise CallerError(f"slices of a pair are equally long: ours={ours.num_bytes}, theirs={theirs.num_bytes}")
        if ours.region not in registered:
            raise CallerError(f"the region of a slice is not registered: {ours}")


def _kinds(pair: Pair) -> tuple[MemoryKind, MemoryKind]:
    ours, theirs = pair
    return ours.region.kind, theirs.kind


def _moves(pair: Pair, max_bytes: int) -> Iterator[Move]:
    ours, theirs = pair
    for start in range(0, ours.num_bytes, max_bytes):
        yield Move(
            our_address=ours.address + start,
            their_address=theirs.address + start,
            num_bytes=min(max_bytes, ours.num_bytes - start),
            our_device=ours.region.device_id,
            their_device=theirs.device_id,
        )
