"""Prompts that are read while they are computed: what is computed travels, the rest is waited for, and never read."""

import time
from functools import partial

import pytest

from kv_core.errors import CallerError
from kv_core.ids import RequestId
from kv_core.spans import Span
from kv_testing.growing import EVERY_PATH, SHORT, GrowingPrompt, arrived, steps, world_of
from kv_testing.layouts import make_state
from kv_testing.waiting import wait_for
from kv_testing.worlds import NUM_TOKENS, PROMPT, SOON_S, Switches, fresh_id, pair, state_of
from kv_transfer.orders import Offer
from kv_transfer.plan.cache_state import ParallelLayout


def windowed(tp=1, **cut):
    parallel = ParallelLayout.even(tp, [4], 4, **cut)
    return make_state(dtype="float32", head_size=4, tokens_per_block=4, windows=(0, 9, 0, 9), parallel=parallel)


SHAPES = {
    "tp1-tp1": (state_of(), state_of()),
    "tp2-tp1": (state_of(2), state_of(1)),
    "tp3-pp13": (state_of(3), state_of(stages=(1, 3))),
    "other blocks": (state_of(tokens_per_block=4), state_of(tokens_per_block=8, order="token_major")),
    "smaller blocks": (state_of(tokens_per_block=16), state_of(2, tokens_per_block=4)),
    "windows, cp": (windowed(cp=2, context_cut="round_robin"), windowed(2)),
    "cp": (windowed(cp=2, context_cut="contiguous"), windowed()),
}


def _has_arrived(d, num_tokens: int) -> bool:
    return arrived(d) == num_tokens


@pytest.mark.parametrize("path", EVERY_PATH)
@pytest.mark.parametrize(("prefill", "decode"), SHAPES.values(), ids=SHAPES)
def test_a_prompt_is_taken_while_it_is_computed(prefill, decode, path):
    with world_of(path, prefill, decode) as (p, d, _):
        prompt = GrowingPrompt(p).open()
        d.order(p, prompt.transfer_id)
        for num_computed in (3, 16, 17, 33, NUM_TOKENS):
            time.sleep(0.02)
            prompt.advance(num_computed)
        received = d.outcomes(others=[p])
        assert all(each.ok for each in received), received
        assert d.misplaced() == 0
        assert p.sent == [], "its blocks are its engine's until it is complete"
        d.release(p, prompt.transfer_id)
        wait_for(lambda: (p.step(), p.door.status().gauges["offers"] == 0)[1], what="the release")
        assert p.sent == []
        prompt.complete()
        d.check_clean()
        p.check_clean()
        assert sorted(p.sent) == [(rank, "p0") for rank in prompt.ranks]


def test_what_is_computed_arrives_before_the_rest_is():
    """And whoever waits keeps no memory from others."""
    with pair(state_of(2), state_of()) as (p, d, _):
        prompt, everybody = GrowingPrompt(p).open(18), (*p.ranks, *d.ranks)
        d.order(p, prompt.transfer_id)
        for num_computed in (18, 21, 36):
            in_chunks = num_computed // 4 * 4
            wait_for(partial(_has_arrived, d, in_chunks), what="what is computed, in whole chunks")
            assert d.misplaced(Span(0, in_chunks)) == 0
            wait_for(lambda: not any(rank.status().gauges["leases"] for rank in everybody), what="no memory in use")
            assert (d.received, p.ranks[0].status().gauges["growing"]) == ([], 1)
            prompt.advance({18: 21, 21: 36, 36: NUM_TOKENS}[num_computed])
        assert d.outcome(others=[p]).ok
        prompt.complete()
        d.release(p, prompt.transfer_id)
        d.check_clean()
        p.check_clean()


@pytest.mark.parametrize("path", EVERY_PATH)
def test_a_part_that_is_computed_needs_no_more(path):
    with world_of(path) as (p, d, _):
        prompt = GrowingPrompt(p).open(24)
        d.order(p, prompt.transfer_id, tokens=Span(5, 23))
        assert d.outcome(others=[p]).ok
        assert d.misplaced(Span(5, 23)) == 0
        prompt.abandon()
        steps(p)
        p.check_clean()


def test_an_ask_may_come_before_its_growing_offer():
    with pair() as (p, d, _):
        transfer = fresh_id()
        d.order(p, transfer)
        wait_for(lambda: p.ranks[0].status().gauges["parked"], what="a parked ask")
        prompt = GrowingPrompt(p, transfer_id=transfer).open(8)
        prompt.advance(NUM_TOKENS)
        assert d.outcome(others=[p]).ok
        assert d.misplaced() == 0
        prompt.complete()
        d.release(p, transfer)
        p.check_clean()


@pytest.mark.parametrize("path", EVERY_PATH)
def test_a_prompt_that_stands_still_ends_its_loads_with_both_values(path):
    with world_of(path, config=SHORT) as (p, d, _):
        prompt, begun = GrowingPrompt(p).open(12), time.monotonic()
        d.order(p, prompt.transfer_id)
        reason = d.outcome(others=[p]).reason
        assert "computed=[0, 12), wanted=[0, 40)" in reason
        assert 0.9 < time.monotonic() - begun < SOON_S
        d.check_clean()
        wait_for(lambda: p.ranks[0].status().gauges["sessions"] == 0, what="the end of the session")
        prompt.abandon()
        p.check_clean()


def test_progress_that_is_lost_is_asked_for():
    faults = Switches(dropped={"Ready"})
    with pair(prefill_faults=faults) as (p, d, _):
        prompt = GrowingPrompt(p).open(8)
        d.order(p, prompt.transfer_id)
        wait_for(lambda: faults.num_said["Ready"], what="a lost Ready")
        faults.dropped.clear()
        wait_for(lambda: arrived(d) == 8, what="what is computed")
        faults.dropped.add("Ready")
        prompt.advance(NUM_TOKENS)
        wait_for(lambda: faults.num_said["Ready"] > 2, what="another lost Ready")
        faults.dropped.clear()
        assert d.outcome(others=[p]).ok
        assert d.misplaced() == 0
        prompt.complete()
        d.release(p, prompt.transfer_id)
        p.check_clean()


def test_a_lease_that_ends_meanwhile_cuts_nobody_off():
    with pair() as (p, d, _):
        prompt = GrowingPrompt(p).open(8)
        d.order(p, prompt.transfer_id)
        wait_for(lambda: arrived(d) == 8, what="what is computed")
        p.settle(prompt.transfer_id, reason="expired")
        prompt.advance(NUM_TOKENS)
        assert d.outcome(others=[p]).ok
        d.order(p, prompt.transfer_id, "late")
        assert "expired" in d.outcome("late", others=[p]).reason
        assert p.sent == []
        prompt.complete()
        wait_for(lambda: p.step() == [(0, "p0")], what="its blocks, free")
        p.withdraw()
        p.check_clean()


def test_a_peer_that_grants_too_early_is_refused(monkeypatch):
    monkeypatch.setattr("kv_transfer.ungranted.needed", lambda chunk, tokens: Span(0, 0))
    with pair() as (p, d, _):
        prompt = GrowingPrompt(p).open(8)
        d.order(p, prompt.transfer_id)
        assert "granted too early: the prompt is not computed so far: computed=[0, 8)" in d.outcome(others=[p]).reason
        prompt.abandon()
        d.check_clean()
        p.check_clean()


def _told(prompt: GrowingPrompt, num_computed: int, change=lambda tables: tables) -> None:
    tables = change(prompt.tables(0, num_computed).by_group)
    prompt.side.ranks[0].advance(prompt.request_id, num_computed, tables)


WRONG = {
    "back": (lambda prompt: _told(prompt, 15), "told before=16, prompt=40, told now=15"),
    "beyond": (lambda prompt: _told(prompt, 41), "told before=16, prompt=40, told now=41"),
    "another block": (
        lambda prompt: _told(prompt, 20, lambda tables: ((99, *tables[0][1:]),)),
        r"group=0, entry=0, before=\d+, now=99",
    ),
    "a hole": (
        lambda prompt: _told(prompt, 20, lambda tables: ((tables[0][0], -1, *tables[0][2:]),)),
        r"group=0, entry=1, before=\d+, now=-1",
    ),
    "too few": (
        lambda prompt: _told(prompt, 20, lambda tables: (tables[0][:4],)),
        "tokens=20, blocks wanted=5, held=4",
    ),
    "shrinks": (lambda prompt: _shrink(prompt), "blocks before=5, now=4"),
    "complete too early": (lambda prompt: prompt.side.ranks[0].complete(prompt.request_id), "computed=16, prompt=40"),
    "offered again": (lambda prompt: prompt.open(16), "offered already"),
    "unknown": (lambda prompt: prompt.side.ranks[0].advance(RequestId("x"), 1, ((0,),)), "no offer of this request"),
    "unknown end": (lambda prompt: prompt.side.ranks[0].abandon(RequestId("x"), "y"), "no offer of this request"),
}


def _shrink(prompt: GrowingPrompt) -> None:
    """One block ahead is told, and then is not."""
    ahead = prompt.tables(0, 20).by_group
    prompt.side.ranks[0].advance(prompt.request_id, 16, ahead)
    prompt.side.ranks[0].advance(prompt.request_id, 16, (ahead[0][:4],))


@pytest.mark.parametrize(("call", "why"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_refused_and_changes_nothing(call, why):
    with pair() as (p, d, _):
        prompt = GrowingPrompt(p).open(16)
        p.door.withdraw_offer(prompt.request_id, "tested elsewhere")
        wait_for(lambda: p.door.poll_settled(), what="the end at the door")
        with pytest.raises(CallerError, match=why):
            call(prompt)
        d.order(p, prompt.transfer_id)
        prompt.advance(NUM_TOKENS)
        assert d.outcome(others=[p]).ok
        assert d.misplaced() == 0
        prompt.complete()
        with pytest.raises(CallerError, match="no offer of this request is growing"):
            prompt.side.ranks[0].abandon(prompt.request_id, "late")
        p.settle(prompt.transfer_id)
        p.withdraw()
        p.check_clean()


def test_too_few_blocks_are_refused_at_once():
    with pair() as (p, _, _):
        tables = GrowingPrompt(p).tables(0, 8)
        with pytest.raises(CallerError, match="tokens=9, blocks wanted=3, held=2"):
            p.ranks[0].offer(Offer(fresh_id(), RequestId("p0"), PROMPT, tables, 9))
        p.check_clean()


def test_closing_waits_for_no_prompt():
    with pair() as (p, d, _):
        prompt = GrowingPrompt(p).open(8)
        d.order(p, prompt.transfer_id)
        wait_for(lambda: arrived(d) == 8, what="what is computed")
        begun = time.monotonic()
        for rank in p.ranks:
            rank.close(SOON_S)
        assert time.monotonic() - begun < SOON_S / 2
        assert not d.outcome().ok
