"""Cuts a movement into posts of bounded size.

In:  pairs of equally long slices, or whole tables of runs, and the most bytes that one post may move.
Out: pieces, in order; one piece is one post.
Law: every byte of the movement lies in exactly one piece; a piece moves at most `max_post_bytes`, between one kind of
     memory on our side and one on theirs.

Legend: N runs of a table.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from kv_core.errors import CallerError
from kv_transfer.agent.base import Direction, Movement, Pair, Runs
from kv_transfer.agent.cards import MemoryKind
from kv_transfer.regions import Region

Table = NDArray[np.uint64]
"""[N, 5]: our address, their address, bytes, our device, their device."""

OURS: Final = [0, 2, 3]
THEIRS: Final = [1, 2, 4]
"""Columns of a table that describe one side: (address, bytes, device), as transports want them."""

Kinds = tuple[MemoryKind, MemoryKind]


@dataclass(frozen=True, slots=True)
class Move:
    """`num_bytes` bytes between two addresses, each in the address space of its own side's device."""

    our_address: int
    their_address: int
    num_bytes: int
    our_device: int
    their_device: int


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What one post moves."""

    direction: Direction
    our_kind: MemoryKind
    their_kind: MemoryKind
    table: Table
    num_bytes: int

    @property
    def moves(self) -> Iterator[Move]:
        """Run by run."""
        return (Move(*row) for row in self.table.tolist())


def cut(direction: Direction, movement: Movement, max_post_bytes: int) -> tuple[Piece, ...]:
    """The pieces of a movement: a large run is split, small neighbours of the same kinds share a post."""
    return tuple(
        Piece(direction, *kinds, part, int(part[:, 2].sum()))
        for kinds, together in groupby(movement, key=_kinds)
        for part in _bounded(
            _split(np.concatenate([_table(each) for each in together]), max_post_bytes), max_post_bytes
        )
    )


def regions_of(movement: Movement) -> Iterator[Region]:
    """Our regions, of which bytes move."""
    return (each.region if isinstance(each, Runs) else each[0].region for each in movement)


def check_movement(movement: Movement, registered: Set[Region]) -> None:
    """Raises CallerError unless there is something to move, equally long on both sides, ours in a registered region."""
    if not movement:
        raise CallerError("a movement has at least one pair of slices")
    for each in movement:
        if not isinstance(each, Runs) and each[0].num_bytes != each[1].num_bytes:
            ours, theirs = each
            raise CallerError(f"slices of a pair are equally long: ours={ours.num_bytes}, theirs={theirs.num_bytes}")
    for region in regions_of(movement):
        if region not in registered:
            raise CallerError(f"the region of a slice is not registered: {region}")


def _kinds(each: Pair | Runs) -> Kinds:
    if isinstance(each, Runs):
        return each.region.kind, each.their_kind
    ours, theirs = each
    return ours.region.kind, theirs.kind


def _table(each: Pair | Runs) -> Table:
    if not isinstance(each, Runs):
        ours, theirs = each
        row = ours.address, theirs.address, ours.num_bytes, ours.region.device_id, theirs.device_id
        return np.array([row], dtype=np.uint64)
    table = np.empty((len(each.lengths), 5), dtype=np.uint64)
    table[:, 0], table[:, 1], table[:, 2] = each.ours, each.theirs, each.lengths
    table[:, 3], table[:, 4] = each.region.device_id, each.their_device
    return table


def _split(table: Table, max_bytes: int) -> Table:
    """Every run that is too long for one post as several."""
    lengths = table[:, 2].astype(np.int64)
    if lengths.max() <= max_bytes:
        return table
    num_parts = -(-lengths // max_bytes)
    split = np.repeat(table, num_parts, axis=0)
    firsts = np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    skipped = (np.arange(len(split)) - firsts) * max_bytes
    split[:, 2] = np.minimum(np.repeat(lengths, num_parts) - skipped, max_bytes)
    split[:, :2] += skipped.astype(np.uint64)[:, None]
    return split


def _bounded(table: Table, max_bytes: int) -> Iterator[Table]:
    """As many neighbouring runs at a time as one post may move."""
    ends = np.cumsum(table[:, 2].astype(np.int64))
    start = 0
    while start < len(table):
        moved = int(ends[start - 1]) if start else 0
        stop = cast("int", np.searchsorted(ends, moved + max_bytes, side="right"))
        yield table[start:stop]
        start = stop
