"""Prompts that are given up while they are read: who reads goes on with an equal one or is told why; who asks waits, if
the prompt comes again."""

import time

import pytest

from kv_core.ids import RequestId
from kv_testing.growing import EVERY_PATH, SHORT, GrowingPrompt, arrived, given_up_while_read, steps, world_of
from kv_testing.hangs import planted
from kv_testing.waiting import wait_for
from kv_testing.worlds import NUM_TOKENS, SOON_S, pair


@pytest.mark.parametrize("path", EVERY_PATH)
@pytest.mark.parametrize("reason", ["preempted", "aborted"])
def test_a_prompt_that_is_given_up_ends_its_loads_with_the_reason(path, reason):
    with world_of(path) as (p, d, _):
        prompt = GrowingPrompt(p).open(12)
        d.order(p, prompt.transfer_id)
        wait_for(lambda: p.ranks[0].status().gauges["sessions"], what="a session")
        prompt.advance(16)
        prompt.abandon(reason)
        told = d.outcome(others=[p]).reason
        assert f"gone: {reason}: computed=[0, 16) of [0, 40), wanted=[0, 40)" in told
        d.order(p, prompt.transfer_id, "late")
        assert reason in d.outcome("late", others=[p]).reason
        d.check_clean()
        p.check_clean()
        assert p.sent == [], "nobody waits for blocks that were taken back"


def test_a_request_may_be_offered_anew():
    """One that was preempted and computed again, under the same names."""
    with pair() as (p, d, _):
        prompt = GrowingPrompt(p).open(12)
        prompt.abandon("preempted")
        wait_for(lambda: (p.step(), prompt.request_id not in p.door._open)[1], what="the end at the door")
        prompt.open(4)
        d.order(p, prompt.transfer_id)
        prompt.advance(NUM_TOKENS)
        assert d.outcome(others=[p]).ok
        prompt.complete()
        d.release(p, prompt.transfer_id)
        d.check_clean()
        p.check_clean()
        assert p.sent == [(0, "p0")]


def test_bytes_that_were_read_after_the_end_are_not_written():
    with pair() as (p, d, _):
        prompt = GrowingPrompt(p).open(NUM_TOKENS)
        given_up_while_read(p, d, prompt)


def test_of_two_equal_prompts_the_one_that_is_further_serves():
    with pair() as (p, d, _):
        prompt = GrowingPrompt(p).open(8)
        p.offer("p1", prompt.transfer_id)
        d.order(p, prompt.transfer_id)
        assert d.outcome(others=[p]).ok
        prompt.abandon()
        p.withdraw("p1")
        p.check_clean()


@pytest.mark.parametrize("path", EVERY_PATH)
def test_a_prompt_that_is_given_up_leaves_its_loads_to_an_equal_one(path):
    with world_of(path) as (p, d, _):
        prompt = GrowingPrompt(p).open(12)
        d.order(p, prompt.transfer_id)
        wait_for(lambda: p.ranks[0].status().gauges["sessions"], what="a session")
        p.offer("p1", prompt.transfer_id)
        prompt.give_up()
        received = d.outcome(others=[p])
        assert received.ok, received
        assert d.misplaced() == 0
        p.withdraw("p1")
        d.check_clean()
        p.check_clean()
        assert p.sent == [(0, "p1")]


def test_an_equal_prompt_that_is_behind_goes_on_where_the_other_was_given_up():
    """What was read of blocks that were taken back is read again, once it is computed again."""
    with pair() as (p, d, _):
        prompt = GrowingPrompt(p).open(24)
        with planted(p.cores[0].sender.passages._copier, "_parts") as gather:
            gather.hang()
            d.order(p, prompt.transfer_id)
            gather.wait_until_met()
            other = GrowingPrompt(p, RequestId("p1"), prompt.transfer_id).open(8)
            prompt.give_up()
        wait_for(lambda: arrived(d) == 8, what="what the other has computed")
        other.advance(24)
        wait_for(lambda: arrived(d) == 24, what="what was told before")
        other.advance(NUM_TOKENS)
        assert d.outcome(others=[p]).ok
        assert d.misplaced() == 0
        other.complete()
        d.release(p, prompt.transfer_id)
        wait_for(lambda: p.step() == [(0, "p1")], what="the end of the other")
        d.check_clean()
        p.check_clean()


def test_of_equal_prompts_the_last_that_is_given_up_ends_the_load():
    with pair() as (p, d, _):
        prompt = GrowingPrompt(p).open(12)
        d.order(p, prompt.transfer_id)
        wait_for(lambda: arrived(d) == 12, what="what is computed")
        other = GrowingPrompt(p, RequestId("p1"), prompt.transfer_id).open(8)
        prompt.give_up("preempted")
        steps(p)
        other.give_up("aborted")
        assert "gone: aborted: computed=[0, 8) of [0, 40), wanted=[0, 40)" in d.outcome(others=[p]).reason
        d.check_clean()
        p.check_clean()


WAITS = "an ask that waits"


def _late_ask(p, d, prompt):
    """One that comes when the prompt was given up, and will come again."""
    prompt.give_up("preempted", comes_again=True)
    prompt.compute(0)
    d.order(p, prompt.transfer_id)
    wait_for(lambda: p.ranks[0].status().gauges["parked"], what=WAITS)


@pytest.mark.parametrize("path", EVERY_PATH)
def test_who_asks_for_what_comes_again_waits_for_it(path):
    with world_of(path) as (p, d, _):
        prompt = GrowingPrompt(p).open(12)
        _late_ask(p, d, prompt)
        prompt.come_again()
        assert d.outcome(others=[p]).ok
        assert d.misplaced() == 0
        d.release(p, prompt.transfer_id)
        d.check_clean()
        p.check_clean()
        assert p.sent == [(0, "p0")]


def test_who_waits_for_what_comes_again_is_told_if_it_does_not():
    with pair() as (p, d, _):
        prompt = GrowingPrompt(p).open(12)
        _late_ask(p, d, prompt)
        p.door.withdraw_offer(prompt.request_id, "aborted")
        assert "is gone: aborted" in d.outcome(others=[p]).reason
        d.order(p, prompt.transfer_id, "late")
        assert "is gone: aborted" in d.outcome("late", others=[p]).reason
        d.check_clean()
        p.check_clean()
        assert p.sent == []


def test_who_waits_for_what_comes_again_waits_until_its_deadline():
    with pair(config=SHORT) as (p, d, _):
        prompt, begun = GrowingPrompt(p).open(12), time.monotonic()
        _late_ask(p, d, prompt)
        assert not d.outcome(others=[p]).ok
        assert 0.9 < time.monotonic() - begun < SOON_S
        wait_for(lambda: p.ranks[0].status().gauges["sessions"] == 0, what="the end of the session")
        p.door.withdraw_offer(prompt.request_id, "aborted")
        d.check_clean()
        p.check_clean()
