"""Hand-overs whose copies use tables kept for the request, and add up the checksum in passing: as on a GPU."""

from dataclasses import replace

import pytest

from kv_core.spans import Span
from kv_testing.exchanges import spoil_writes
from kv_testing.switches import Switches
from kv_testing.worlds import FAST, pair, state_of
from kv_transfer import copies
from kv_transfer.checksum import Summer


@pytest.fixture(autouse=True)
def tabled(monkeypatch):
    monkeypatch.setattr(copies, "pays", lambda caches: True)


@pytest.fixture
def summed(monkeypatch):
    """Sizes of what a pass of its own was made for."""
    made, compute = [], Summer.checksum

    def counted(self, staged):
        made.append(staged.numel())
        return compute(self, staged)

    monkeypatch.setattr(Summer, "checksum", counted)
    return made


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
def test_a_hand_over_makes_no_pass_for_its_checksums(summed, ranks):
    with pair(*(state_of(tp) for tp in ranks)) as (p, d, _):
        for number in range(3):
            transfer = p.offer(f"p{number}")
            d.order(p, transfer, f"d{number}")
            received = d.outcome(f"d{number}", others=[p])
            assert received.ok, received.reason
            d.release(p, transfer, f"d{number}")
        assert d.misplaced() == 0
    assert not summed


def test_a_changed_bit_fails_the_load(monkeypatch):
    with pair() as (p, d, _):
        spoil_writes(monkeypatch)
        transfer = p.offer()
        d.order(p, transfer)
        received = d.outcome(others=[p])
        assert not received.ok
        assert "checksums of chunk" in received.reason
        assert d.count("chunks_bad") > 0
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()


def test_control_without_checksums_it_goes_unnoticed(monkeypatch):
    spoil_writes(monkeypatch)
    with pair(config=replace(FAST, checksum=False)) as (p, d, _):
        d.order(p, p.offer())
        assert d.outcome(others=[p]).ok
        assert d.misplaced() > 0


def test_where_a_test_may_change_verified_bytes_they_are_verified_first(monkeypatch, summed):
    """The sender adds up in passing, the receiver with faults in a pass of its own, before anything is scattered."""
    with pair(decode_faults=Switches()) as (p, d, _):
        d.order(p, p.offer())
        received = d.outcome(others=[p])
        assert received.ok
        assert len(summed) == received.num_chunks
        spoil_writes(monkeypatch)
        d.order(p, p.offer("p1"), "d1")
        assert "checksums of chunk" in d.outcome("d1", others=[p]).reason
    with pair(decode_faults=Switches()) as (p, d, _):
        d.order(p, p.offer())
        assert "checksums of chunk" in d.outcome(others=[p]).reason
        assert d.misplaced(Span(0, 0)) == 0, "spoilt bytes were scattered"
