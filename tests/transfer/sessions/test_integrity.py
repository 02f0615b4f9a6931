"""Bytes that are not those that were sent are never scattered, or are seen to be wrong."""

from dataclasses import replace
from threading import Event

import pytest
import torch

from kv_core.spans import Span
from kv_kernels.reference import weights
from kv_testing.exchanges import spoil_writes
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, Switches, pair
from kv_transfer.checksum import Pending, Summer


def test_a_changed_bit_fails_the_load(monkeypatch):
    spoil_writes(monkeypatch)
    with pair() as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        received = d.outcome(others=[p])
        assert not received.ok
        assert "checksums of chunk" in received.reason
        assert "ours=" in received.reason
        assert "theirs=" in received.reason
        assert d.misplaced(Span(0, 0)) == 0, "spoilt bytes were scattered"
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()
        assert d.count("chunks_bad") > 0


def test_control_without_checksums_it_goes_unnoticed(monkeypatch):
    spoil_writes(monkeypatch)
    with pair(config=replace(FAST, checksum=False)) as (p, d, _):
        d.order(p, p.offer())
        assert d.outcome(others=[p]).ok
        assert d.misplaced() > 0


def test_a_sender_must_give_the_checksum_that_was_asked_for(monkeypatch):
    monkeypatch.setattr(Summer, "checksum", lambda summer, staged: None)
    with pair() as (p, d, _):
        d.order(p, p.offer())
        received = d.outcome(others=[p])
        assert "(bytes, checksum)" in received.reason
        d.check_clean()


def test_a_checksum_that_a_stream_computes_is_waited_for_on_both_sides(monkeypatch):
    """As on a GPU: the number is there only when what was queued is over."""
    compute, made = Summer.checksum, []

    def pending(summer, staged):
        made.append(Pending((torch.tensor([compute(summer, staged)]),)))
        return made[-1]

    monkeypatch.setattr(Summer, "checksum", pending)
    with pair() as (p, d, _):
        d.order(p, p.offer())
        received = d.outcome(others=[p])
        assert received.ok
        assert d.misplaced() == 0
        assert len(made) == 2 * received.num_chunks
        spoil_writes(monkeypatch)
        d.order(p, p.offer("p1"), "d1")
        assert "checksums of chunk" in d.outcome("d1", others=[p]).reason


def test_the_hook_behind_verification_reaches_the_blocks():
    """What a test of an engine uses as negative control: corrupt a received block after it was verified."""

    def corrupt(chunk, received):
        if chunk.seq == 0:
            received[0] ^= 1

    with pair(decode_faults=Switches(corrupts=corrupt)) as (p, d, _):
        d.order(p, p.offer())
        assert d.outcome(others=[p]).ok
        assert d.misplaced() == 1


def test_a_load_that_fails_waits_for_its_last_scatter():
    """The engine hears of the failure only when none of our copies can touch its blocks any more."""
    entered, leave = Event(), Event()

    def pause(chunk, received):
        entered.set()
        leave.wait(5)

    with pair(decode_faults=Switches(corrupts=pause)) as (p, d, _):
        d.order(p, p.offer())
        wait_for(entered.is_set, what="a scatter under way")
        d.abort("d0")
        wait_for(lambda: d.ranks[0].status().counters.get("loads_failed"), what="the decision")
        d.step()
        assert d.received == []
        leave.set()
        assert d.outcome(others=[p]).reason == "aborted by the engine"


def test_an_agent_that_fails_a_write_fails_the_load():
    with pair() as (p, d, hub):
        hub.fail(p.agents[0].name, 1)
        transfer = p.offer()
        d.order(p, transfer)
        received = d.outcome(others=[p])
        assert "write_failed" in received.reason
        assert d.misplaced(Span(0, 0)) != 0 or received.num_chunks == 0
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()
        transfer = p.offer("p1")
        d.order(p, transfer, "d1")
        assert d.outcome("d1", others=[p]).ok


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 64, 1001, 4096])
def test_the_checksum_is_the_documented_one(num_bytes):
    staged = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))
    assert Summer().checksum(staged) == _by_hand(bytes(staged.tolist()))


def test_any_changed_word_changes_the_checksum():
    summer = Summer()
    staged = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    before = summer.checksum(staged)
    for at in range(0, 4096, 97):
        for bit in (1, 128):
            staged[at] ^= bit
            assert summer.checksum(staged) != before
            staged[at] ^= bit
    assert (weights(10_000) & 1).all()


def _by_hand(staged):
    total = 0
    for number in range(-(-len(staged) // 8)):
        mixed = number + 1
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            mixed = ((mixed ^ (mixed >> 33)) * factor) % (1 << 64)
        word = int.from_bytes(staged[8 * number : 8 * number + 8], "little")
        total += word * ((mixed ^ (mixed >> 33)) | 1)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
