"""The staging arena against a naive model: a list with the state of every granule."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kv_core.errors import CallerError, CapacityError
from kv_transfer.regions import host_region
from kv_transfer.staging import GRANULE_BYTES, Arena, LeaseEnded, LeaseState, StagingLease

GRANULE = 64
WRITERS = st.sampled_from(["p0", "p1", ("p", 0)])


def make_arena(num_granules: int = 8, spare_bytes: int = 0) -> Arena:
    return Arena(host_region(num_granules * GRANULE + spare_bytes, pinned=False), GRANULE)


class NaiveArena:
    """Who has each granule; room is looked for by trying every aligned place."""

    def __init__(self, num_granules: int) -> None:
        self.granules: list[StagingLease | None] = [None] * num_granules

    def has_room(self, num_bytes: int) -> bool:
        size = 1
        while size * GRANULE < num_bytes:
            size *= 2
        starts = range(0, len(self.granules) - size + 1, size)
        return any(not any(self.granules[start : start + size]) for start in starts)

    def mark(self, lease: StagingLease, owner: StagingLease | None) -> None:
        size = 1
        while size * GRANULE < lease.slice.num_bytes:
            size *= 2
        first = lease.slice.offset // GRANULE
        for granule in range(first, first + size):
            assert self.granules[granule] is (None if owner else lease), "two leases share a granule"
            self.granules[granule] = owner


class ArenaMachine(RuleBasedStateMachine):
    held = Bundle("held")
    quarantined = Bundle("quarantined")
    freed = Bundle("freed")

    @initialize(num_granules=st.integers(1, 40), spare_bytes=st.integers(0, GRANULE - 1))
    def make(self, num_granules: int, spare_bytes: int) -> None:
        self.arena = make_arena(num_granules, spare_bytes)
        self.naive = NaiveArena(num_granules)
        self.writers: dict[StagingLease, object] = {}
        self.num_held = 0

    @rule(target=held, num_bytes=st.integers(1, 12 * GRANULE))
    def lease(self, num_bytes: int):
        if num_bytes > self.arena.max_lease_bytes:
            with pytest.raises(CapacityError, match=rf"wanted={num_bytes} .*largest={self.arena.max_lease_bytes} "):
                self.arena.lease(num_bytes, "x")
            return multiple()
        room = self.naive.has_room(num_bytes)
        lease = self.arena.lease(num_bytes, "x")
        assert (lease is not None) == room
        if lease is None:
            return multiple()
        assert lease.slice.num_bytes == num_bytes
        assert lease.state is LeaseState.HELD
        self.naive.mark(lease, lease)
        self.num_held += 1
        return lease

    @rule(target=freed, lease=consumes(held))
    def release(self, lease: StagingLease):
        lease.release()
        self.naive.mark(lease, None)
        self.num_held -= 1
        return lease

    @rule(target=quarantined, lease=consumes(held), writer=WRITERS)
    def quarantine(self, lease: StagingLease, writer: object):
        lease.quarantine(writer)
        self.writers[lease] = writer
        self.num_held -= 1
        return lease

    @rule(writer=WRITERS)
    def quiet(self, writer: object) -> None:
        kept = [lease for lease, other in self.writers.items() if other == writer]
        assert self.arena.quiet(writer) == len(kept)
        for lease in kept:
            self.naive.mark(lease, None)
            del self.writers[lease]

    @rule(lease=freed | quarantined)
    def end_again(self, lease: StagingLease) -> None:
        with pytest.raises(LeaseEnded, match="a lease ends once"):
            lease.release()
        with pytest.raises(LeaseEnded, match="a lease ends once"):
            lease.quarantine("p9")

    @invariant()
    def agrees(self) -> None:
        self.arena.check()
        assert self.arena.num_leases == self.num_held
        assert self.arena.num_quarantined == len(self.writers)
        assert self.arena.writers == frozenset(self.writers.values())
        assert self.arena.num_free_bytes == self.naive.granules.count(None) * GRANULE
        assert all(lease.state is LeaseState.QUARANTINED for lease in self.writers)


ArenaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestArenaAgainstNaiveModel = ArenaMachine.TestCase


def test_no_room_is_none_and_room_comes_back_whole() -> None:
    arena = make_arena(8)
    leases = [arena.lease(GRANULE, f"r{number}") for number in range(8)]
    assert arena.lease(1, "late") is None
    for lease in leases:
        assert lease is not None
        lease.release()
    assert arena.lease(8 * GRANULE, "whole") is not None


def test_too_large_names_both_sizes() -> None:
    arena = make_arena(7)
    assert arena.max_lease_bytes == 4 * GRANULE
    with pytest.raises(CapacityError, match=r"wanted=257 bytes, largest=256 bytes \(arena of 448 bytes"):
        arena.lease(257, "x")
    arena.check()


def test_quarantined_memory_goes_to_nobody_until_its_writer_is_quiet() -> None:
    arena = make_arena(2)
    kept, other = arena.lease(GRANULE, "a"), arena.lease(GRANULE, "b")
    assert kept is not None
    assert other is not None
    kept.quarantine("late writer")
    other.release()
    assert arena.quiet("somebody else") == 0
    assert arena.lease(2 * GRANULE, "c") is None
    assert arena.quiet("late writer") == 1
    assert arena.lease(2 * GRANULE, "c") is not None


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_an_empty_lease_is_refused(num_bytes: int) -> None:
    with pytest.raises(CallerError, match=f"num_bytes={num_bytes}"):
        make_arena().lease(num_bytes, "x")


def test_an_arena_below_one_granule_is_refused() -> None:
    with pytest.raises(CallerError, match="region=63 bytes, granule=64"):
        Arena(host_region(63, pinned=False), GRANULE)


def test_a_lease_of_another_arena_is_refused() -> None:
    ours, theirs = make_arena(), make_arena()
    lease = theirs.lease(1, "x")
    assert lease is not None
    with pytest.raises(LeaseEnded):
        ours.release(lease)
    assert lease.state is LeaseState.HELD


def test_owners_who_keep_their_shares_leave_room_for_one_more():
    arena = Arena(host_region(32 * GRANULE_BYTES, pinned=False))
    kept = []
    for owner in "abcd":
        num_before = len(kept)
        while arena.has_share(GRANULE_BYTES, owner):
            lease = arena.lease(GRANULE_BYTES, owner)
            assert lease is not None, "a share is of what is there"
            kept.append(lease)
        assert len(kept) > num_before
    assert [sum(lease.owner == owner for lease in kept) for owner in "abcd"] == [16, 8, 4, 2]
    assert arena.num_free_bytes == 2 * GRANULE_BYTES
