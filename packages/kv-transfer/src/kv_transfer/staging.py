"""One arena of staging memory, leased in parts.

In:  a registered region; sizes wanted, and who wants them.
Out: a `StagingLease`, or None while there is no room; later the same memory again.
Law: two leases never share a byte, and a byte that a late writer may still touch is leased to nobody. A lease ends
     once: by `release`, or by `quarantine` and then `quiet` of its writer.

The life of a lease, and who ends each state:

    lease() -> HELD ---- release() -------------------------------> free
                 |
                 +------ quarantine(writer) -> QUARANTINED -- quiet(writer) -> free

A buddy allocator: blocks are powers of two of the granule, a block of size s starts at a multiple of s, and two free
halves of one block are joined at once. An arena that is no power of two is cut into falling powers of two:

    7 granules   |0 . . . |4 . |6|      blocks of 4, 2 and 1; the largest lease has 4 granules

Ownership: single owner. The transceiver's reactor thread makes, releases and quarantines every lease of its arenas, so
nothing here is locked; a notice that another thread gets must be posted to the reactor first.
"""

import enum
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from kv_core.errors import CallerError, CapacityError
from kv_core.spans import ceil_div
from kv_transfer.regions import Region, RegionSlice

GRANULE_BYTES = 4096
"""Smallest lease; a page, so that leases do not share one."""


class LeaseState(enum.Enum):
    """Where a lease is in its life."""

    HELD = "held"
    QUARANTINED = "quarantined"
    FREE = "free"


@dataclass(frozen=True, slots=True, eq=False)
class StagingLease:
    """Exclusive use of `slice`, counted for `owner` (whose share it is of); equal only to itself."""

    arena: "Arena" = field(repr=False)
    slice: RegionSlice
    owner: str

    @property
    def state(self) -> LeaseState:
        """Whether it is still held, or quarantined, or free again."""
        return self.arena.state_of(self)

    def release(self) -> None:
        """Ends a held lease whose memory nobody else can be writing; raises LeaseEnded otherwise, changing nothing."""
        self.arena.release(self)

    def quarantine(self, writer: Hashable) -> None:
        """Ends a held lease, and keeps its memory from everybody until `Arena.quiet(writer)`; raises LeaseEnded."""
        self.arena.quarantine(self, writer)


class LeaseEnded(CallerError):
    """A lease that has ended already is ended again."""


@dataclass(slots=True)
class _Entry:
    """What the arena knows of a lease that is not free; `writer` only when quarantined."""

    offset: int
    order: int
    state: LeaseState = LeaseState.HELD
    writer: Hashable = None


class Arena:
    """Leases of one region. Offsets and orders count in granules: a block of order k has 2**k of them."""

    def __init__(self, region: Region, granule: int = GRANULE_BYTES) -> None:
        """Takes as many whole granules as the region has; raises CallerError if that is none."""
        if granule < 1 or region.num_bytes < granule:
            raise CallerError(f"an arena needs a granule of room: region={region.num_bytes} bytes, granule={granule}")
        self.region = region
        self.granule = granule
        self._num_granules = region.num_bytes // granule
        self._top_order = self._num_granules.bit_length() - 1
        self._free: list[set[int]] = [set() for _ in range(self._top_order + 1)]
        for offset, order in _falling_powers(self._num_granules):
            self._free[order].add(offset)
        self._entries: dict[StagingLease, _Entry] = {}
        self._taken: Counter[str] = Counter()

    @property
    def max_lease_bytes(self) -> int:
        """The largest lease that can ever be had."""
        return self.granule << self._top_order

    @property
    def num_free_bytes(self) -> int:
        """Bytes of all free blocks, however scattered."""
        return self.granule * sum(len(offsets) << order for order, offsets in enumerate(self._free))

    @property
    def num_leases(self) -> int:
        """Leases that are held."""
        return sum(entry.state is LeaseState.HELD for entry in self._entries.values())

    @property
    def num_quarantined(self) -> int:
        """Ended leases whose memory a late writer may still touch."""
        return sum(entry.state is LeaseState.QUARANTINED for entry in self._entries.values())

    @property
    def writers(self) -> frozenset[Hashable]:
        """Who keeps memory in quarantine."""
        return frozenset(entry.writer for entry in self._entries.values() if entry.state is LeaseState.QUARANTINED)

    @property
    def quarantined_bytes(self) -> Mapping[str, int]:
        """Bytes in quarantine, by owner."""
        found: Counter[str] = Counter()
        for lease, entry in self._entries.items():
            if entry.state is LeaseState.QUARANTINED:
                found[lease.owner] += self.granule << entry.order
        return found

    def has_share(self, num_bytes: int, owner: str) -> bool:
        """Whether one more lease of that size leaves this owner with at most half of what others leave, or is its only
        one.

        So however many owners keep all that they may have, there is room for one more; a lone one has half.
        """
        taken = self._taken[owner]
        others = self._taken.total() - taken
        return not taken or 2 * (taken + (1 << self._order_for(num_bytes))) <= self._num_granules - others

    def lease(self, num_bytes: int, owner: str) -> StagingLease | None:
        """Exclusive use of `num_bytes` bytes, at a multiple of the granule; None while there is no room.

        Raises CapacityError if there can never be room, CallerError for less than one byte.
        """
        order = self._order_for(num_bytes)
        offset = self._take(order)
        if offset is None:
            return None
        lease = StagingLease(self, RegionSlice(self.region, offset * self.granule, num_bytes), owner)
        self._entries[lease] = _Entry(offset, order)
        self._taken[owner] += 1 << order
        return lease

    def release(self, lease: StagingLease) -> None:
        """See `StagingLease.release`."""
        self._give_back(lease, self._held(lease))

    def quarantine(self, lease: StagingLease, writer: Hashable) -> None:
        """See `StagingLease.quarantine`."""
        entry = self._held(lease)
        entry.state, entry.writer = LeaseState.QUARANTINED, writer

    def quiet(self, writer: Hashable) -> int:
        """Frees all that this writer kept in quarantine, and says how many leases that were.

        The caller has proof that no byte of this writer can still land: its own word, or its death and a grace
        (`agent.base.LATE_BYTES_GRACE_S` says why).
        """
        kept = [
            (lease, entry)
            for lease, entry in self._entries.items()
            if entry.state is LeaseState.QUARANTINED and entry.writer == writer
        ]
        for lease, entry in kept:
            self._give_back(lease, entry)
        return len(kept)

    def state_of(self, lease: StagingLease) -> LeaseState:
        """See `StagingLease.state`."""
        entry = self._entries.get(lease)
        return LeaseState.FREE if entry is None else entry.state

    def check(self) -> None:
        """Proves the invariants; for tests."""
        free = [(offset, order) for order, offsets in enumerate(self._free) for offset in offsets]
        taken = [(entry.offset, entry.order) for entry in self._entries.values()]
        end = 0
        for offset, order in sorted(free + taken):
            assert offset == end, f"law: blocks tile the arena: block at {offset}, the one before ends at {end}"
            assert offset % (1 << order) == 0, f"law: a block starts at a multiple of its size: {offset}, order {order}"
            end = offset + (1 << order)
        assert end == self._num_granules, f"law: blocks tile the arena: last ends at {end} of {self._num_granules}"
        for offset, order in free:
            assert offset ^ (1 << order) not in self._free[order], f"law: free halves are joined: {offset}, {order}"
        counted: Counter[str] = Counter()
        for lease, entry in self._entries.items():
            counted[lease.owner] += 1 << entry.order
            assert entry.state is not LeaseState.FREE, "law: a free lease is forgotten"
            assert lease.slice.offset == entry.offset * self.granule, "law: a lease is where its block is"
            assert lease.slice.num_bytes <= self.granule << entry.order, "law: a lease lies inside its block"
        assert counted == self._taken, f"law: what each owner has is counted: {counted}, {self._taken}"

    def _order_for(self, num_bytes: int) -> int:
        if num_bytes < 1:
            raise CallerError(f"a lease has at least one byte: num_bytes={num_bytes}")
        if num_bytes > self.max_lease_bytes:
            raise CapacityError(
                f"a lease can never fit: wanted={num_bytes} bytes, largest={self.max_lease_bytes} bytes "
                f"(arena of {self.region.num_bytes} bytes, granule {self.granule})"
            )
        return (ceil_div(num_bytes, self.granule) - 1).bit_length()

    def _take(self, order: int) -> int | None:
        """Cuts a block of this order from the smallest free block that has one; lowest address first."""
        source = next((k for k in range(order, self._top_order + 1) if self._free[k]), None)
        if source is None:
            return None
        offset = min(self._free[source])
        self._free[source].remove(offset)
        for smaller in range(order, source):
            self._free[smaller].add(offset + (1 << smaller))
        return offset

    def _give_back(self, lease: StagingLease, entry: _Entry) -> None:
        """Joins the block with its free other half, and that with its own, as far as it goes."""
        del self._entries[lease]
        offset, order = entry.offset, entry.order
        self._taken[lease.owner] -= 1 << order
        if not self._taken[lease.owner]:
            del self._taken[lease.owner]
        while offset ^ (1 << order) in self._free[order]:
            self._free[order].remove(offset ^ (1 << order))
            offset &= ~(1 << order)
            order += 1
        self._free[order].add(offset)

    def _held(self, lease: StagingLease) -> _Entry:
        entry = self._entries.get(lease)
        if entry is None or entry.state is not LeaseState.HELD:
            raise LeaseEnded(
                f"a lease ends once: owner={lease.owner!r}, offset={lease.slice.offset}, state={lease.state.value}"
            )
        return entry


def _falling_powers(num_granules: int) -> list[tuple[int, int]]:
    """(offset, order) of the powers of two that make up `num_granules`, largest first."""
    blocks, offset = [], 0
    for order in reversed(range(num_granules.bit_length())):
        if num_granules & (1 << order):
            blocks.append((offset, order))
            offset += 1 << order
    return blocks
