"""Known defects of the seed's sessions, shown by whole hand-overs (docs/decisions/transfer-defects.md)."""

import threading
from dataclasses import replace

import pytest

from kv_core.spans import Span
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, SOON_S, Switches, pair, state_of
from kv_transfer import sender as sender_module
from kv_transfer.plan.plan import chunks_of

ONE = replace(FAST, send_arena_bytes=4096, receive_arena_bytes=4096)
"""Room for one chunk."""

IMPATIENT = replace(FAST, request_deadline_s=1.0)


def fetched(p, d, number, **how):
    """One more hand-over, begun and ended."""
    transfer = p.offer(f"p{number}", **how)
    d.order(p, transfer, f"d{number}")
    received = d.outcome(f"d{number}", others=[p])
    assert received.ok, received.reason
    d.release(p, transfer, f"d{number}")
    return received


def test_a13_all_copies_of_a_head_give_in_turn():
    with pair(state_of(8), state_of(1)) as (p, d, _):
        for number in range(12):
            fetched(p, d, number, transfer_id=f"{number:032x}")
        given = [rank._reactor.counters["chunks_out"] for rank in p.ranks]
        assert min(given) > 0
        assert max(given) < sum(given) // 4
        assert d.misplaced() == 0


def test_b1_a_sender_that_plans_otherwise_is_found_out_before_a_byte_moves(monkeypatch):
    monkeypatch.setattr(sender_module, "chunks_of", lambda *args: chunks_of(*args)[:-1])
    with pair() as (p, d, _):
        d.order(p, p.offer())
        received = d.outcome(others=[p])
        assert "plans otherwise in (chunks, bytes)" in received.reason
        assert p.count("chunks_out") == 0
        assert d.misplaced(Span(0, 0)) == 0


@pytest.mark.parametrize("stages", [(4,), (2, 2)])
def test_d2_d3_d4_slots_are_never_shared_however_small_the_memory(stages):
    """TP 2 to TP 8: each head goes to two ranks, through memory for one chunk on either side."""
    with pair(state_of(2), state_of(8, stages), config=ONE) as (p, d, _):
        fetched(p, d, 0)
        assert d.misplaced() == 0
        d.check_clean()
        p.check_clean()


def test_b4_another_prompt_of_the_same_transfer_is_not_served():
    with pair(config=IMPATIENT, prefill_config=FAST) as (p, d, _):
        transfer = p.offer(prompt_key=b"a" * 32)
        d.order(p, transfer, prompt_key=b"a" * 31 + b"b")
        assert not d.outcome(others=[p]).ok
        assert p.count("chunks_out") == 0
        d.release(p, transfer, prompt_key=b"a" * 32)
        d.check_clean()
        p.check_clean()


def test_d8_j3_a_load_that_finds_no_memory_ends_by_its_deadline_and_tells_how_long_it_took():
    with pair(config=IMPATIENT, prefill_config=FAST) as (p, d, _):
        held = d.receive_arena().lease(d.receive_arena().max_lease_bytes, "somebody")
        transfer = p.offer()
        d.order(p, transfer)
        received = d.outcome(others=[p])
        assert "deadline" in received.reason
        assert 0.5 < received.times.total_s < SOON_S
        held.release()
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()


def test_e1_e2_e7_e8_sessions_of_one_pair_never_meet():
    """Ids that agree in their last 12 bits, at the same time, over one connection, with memory for one chunk."""
    with pair(config=ONE) as (p, d, _):
        spans = {1: Span(0, 13), 4097: Span(13, 27), 8193: Span(27, 40)}
        transfers = {number: p.offer(f"p{number}", f"{number:032x}") for number in spans}
        for number, tokens in spans.items():
            d.order(p, transfers[number], f"d{number}", tokens)
        for number, tokens in spans.items():
            received = d.outcome(f"d{number}", others=[p])
            assert received.ok, received.reason
            assert received.num_bytes == len(tokens) * 4 * 4 * 2 * 16
            d.release(p, transfers[number], f"d{number}")
        assert d.misplaced() == 0
        d.check_clean()


def test_e10_e14_only_those_who_give_are_called():
    """A receiver that needs a half of the heads never meets the ranks of the other half."""
    with pair(state_of(4), state_of(2)) as (p, d, _):
        fetched(p, d, 0)
        wait_for(lambda: [rank.status().gauges["peers"] for rank in d.ranks] == [2, 2], what="two peers each")


def test_e11_e21_a_peer_says_hello_once_and_no_thread_is_started_for_a_request():
    faults = Switches()
    with pair(decode_faults=faults) as (p, d, _):
        fetched(p, d, 0)
        greeted, threads = faults.num_said["Hello"], threading.active_count()
        for number in range(1, 6):
            fetched(p, d, number)
        assert faults.num_said["Hello"] == greeted
        assert threading.active_count() == threads
