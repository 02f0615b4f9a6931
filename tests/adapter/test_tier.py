"""The scheduler side of the tiers: what is kept, found, loaded, and who waits for what."""

import os
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import CallerError
from kv_core.spans import Span
from kv_engine_adapter import metrics
from kv_engine_adapter.tier_orders import (
    Answer,
    LoadTokens,
    joined,
    tallied,
)
from kv_engine_adapter.tier_terms import BreakEven
from kv_testing.tier_calls import Clock, answer, make, request, save, table
from kv_testing.tier_engine import TierEngine
from kv_transfer.plan.ranges import HOLE


@pytest.fixture
def clock():
    return Clock()


def test_what_ended_is_found_again_with_its_tail(clock):
    tiers = make(clock)
    order = save(tiers, request("a", 717, num_prompt=700))
    assert order.tokens == Span(0, 716)
    assert len(order.slots) == 23
    assert order.tables == table(716)
    assert tiers.num_tokens(request("b", 700), 0) == 699
    assert tiers.num_tokens(request("c", 700), 640) == 59
    assert tiers.num_tokens(request("d", 717), 0) == 716
    assert tiers.num_tokens(request("e", 800), 0) == 716
    assert tiers.num_tokens(request("f", 800, first=1), 0) == 0
    tiers.check()


def test_a_load_names_the_slots_that_were_filled(clock):
    tiers = make(clock)
    saved = save(tiers, request("a", 101))
    again = request("b", 100)
    assert tiers.num_tokens(again, 32) == 67
    assert tiers.allocated(again.request_id, table(100), 67)
    (load,) = tiers.take_orders().jobs
    assert isinstance(load, LoadTokens)
    assert (load.request_id, load.tokens, load.slots) == ("b", Span(32, 99), saved.slots[1:])
    assert tiers.take_orders().jobs == ()
    answer(tiers, (load.job, 99))
    tiers.loads_over(["b", "someone else's"])
    tiers.check()


def test_nothing_is_found_before_every_rank_has_copied_it(clock):
    tiers = make(clock, num_ranks=2)
    job = tiers.finished(request("a", 65), 64, table(64))
    assert tiers.num_tokens(request("b", 65), 0) == 0
    assert len(tiers.take_orders().jobs) == 1
    assert answer(tiers, (job, 64)) == []
    assert tiers.num_tokens(request("c", 65), 0) == 0
    assert tiers.has_work()
    assert answer(tiers, (job, 64)) == [job]
    assert tiers.num_tokens(request("d", 65), 0) == 64
    assert not tiers.has_work()


@pytest.mark.parametrize("told", [(0, 64), (64, 0)])
def test_a_copy_that_failed_on_one_rank_is_not_found(clock, told):
    tiers = make(clock, num_ranks=2)
    job = tiers.finished(request("a", 65), 64, table(64))
    assert answer(tiers, (job, told[0])) == []
    assert answer(tiers, (job, told[1])) == [job]
    assert tiers.num_tokens(request("b", 65), 0) == 0
    assert tiers.counts["saves_failed"] == 1
    tiers.check()


def test_what_is_there_is_not_copied_again(clock):
    tiers = make(clock)
    save(tiers, request("a", 101))
    assert tiers.finished(request("a again", 101), 100, table(100)) is None
    assert tiers.counts["held_already"] == 1
    longer = save(tiers, request("b", 171))
    assert longer.tokens == Span(96, 170)
    assert tiers.num_tokens(request("c", 200), 0) == 170
    assert tiers.num_tokens(request("d", 99), 0) == 98
    tiers.check()


def test_a_repeated_question_costs_no_lookup(clock, monkeypatch):
    tiers = make(clock)
    save(tiers, request("a", 701))
    waiting, missing = request("b", 700), request("c", 700, first=5)
    assert [tiers.num_tokens(each, 0) for each in (waiting, missing)] == [699, 0]
    monkeypatch.setattr(tiers._slots, "find", lambda *_: pytest.fail("looked up again"))
    assert [tiers.num_tokens(each, 0) for each in (waiting, missing) for _ in range(3)] == [699] * 3 + [0] * 3


def test_an_answer_does_not_outlive_what_it_found(clock):
    tiers = make(clock, num_slots=6)
    save(tiers, request("a", 97))
    waiting = request("b", 97)
    assert tiers.num_tokens(waiting, 0) == 96
    save(tiers, request("flood", 161, first=10_000))
    assert tiers.num_tokens(waiting, 0) == 32
    tiers.check()


def test_a_load_that_failed_is_not_found_again(clock):
    tiers = make(clock)
    save(tiers, request("a", 101))
    again = request("b", 101)
    tiers.allocated(again.request_id, table(101), tiers.num_tokens(again, 0))
    (load,) = tiers.take_orders().jobs
    answer(tiers, (load.job, 0))
    tiers.loads_over(["b"], {"b"})
    assert tiers.num_tokens(request("c", 101), 0) == 0
    assert tiers.counts["loads_failed"] == 1
    save(tiers, request("d", 101))
    assert tiers.num_tokens(again, 0) == 0, "an engine may not be able to load for it again"
    tiers.finished(again, 0, ((),))
    assert tiers.num_tokens(again, 0) == 100, "another request of that name"
    tiers.check()


def test_what_is_being_loaded_is_not_kept(clock):
    tiers = make(clock)
    save(tiers, request("a", 101))
    again = request("b", 301)
    tiers.allocated(again.request_id, table(301), tiers.num_tokens(again, 0))
    assert tiers.finished(again, 300, table(300)) is None


@pytest.mark.parametrize(("more", "why"), [
    ({"needs_every_token": True}, "wants every token computed"), ({"why_unshared": "an adapter"}, "nobody shares it"),
])  # fmt: skip
def test_who_takes_nothing(clock, more, why):
    tiers = make(clock)
    save(tiers, request("a", 101))
    assert tiers.num_tokens(request("b", 101, **more), 0) == 0, why


def test_what_nobody_may_share_is_not_kept(clock):
    tiers = make(clock)
    assert tiers.finished(request("a", 101, why_unshared="an adapter"), 100, table(100)) is None
    assert tiers.counts["unshared"] == 1
    save(tiers, request("b", 101, salt="s"))
    assert tiers.num_tokens(request("c", 101), 0) == 0
    assert tiers.num_tokens(request("d", 101, salt="s"), 0) == 100


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("begins_anew", [False, True])
def test_what_was_computed_before_a_reset_is_not_kept_after_it(clock, elsewhere, begins_anew):
    """A request goes on, or has been preempted meanwhile; `elsewhere`: its prompt is from a peer."""
    tiers, long = make(clock), request("a", 101)

    def begin():
        tiers.forget(long.request_id) if elsewhere else tiers.num_tokens(long, 0)
        tiers.allocated(long.request_id, table(101), 0)

    begin()
    tiers.reset()
    if begins_anew:
        begin()
    job = tiers.finished(long, 100, table(100))
    assert (job is not None) == begins_anew
    answer(tiers, *[(order.job, 100) for order in tiers.take_orders().jobs])
    assert tiers.num_tokens(request("b", 101), 0) == (100 if begins_anew else 0)
    tiers.finished(request("c", 101), 100, table(100))
    tiers.check()


def test_a_preempted_request_finds_what_it_has_said_itself_and_nothing_is_kept_of_one_that_goes_while_it_loads(clock):
    """Beyond its prompt, so that an engine that counts what is being loaded as computed has more than a prompt."""
    tiers = make(clock)
    save(tiers, request("twin", 141, num_prompt=100))
    resumed = request("a", 120, num_prompt=100)
    assert tiers.num_tokens(resumed, 0) == 119
    assert tiers.allocated(resumed.request_id, table(120), 119)
    assert tiers.finished(resumed, 119, table(120)) is None
    (load,) = tiers.take_orders().jobs
    answer(tiers, (load.job, 119))
    tiers.loads_over([resumed.request_id])
    tiers.check()


def test_a_request_longer_than_the_tier_is_kept_up_to_its_room(clock):
    tiers = make(clock, num_slots=3)
    job = tiers.finished(request("a", 301), 300, table(300))
    (order,) = tiers.take_orders().jobs
    assert order.tokens == Span(0, 96)
    answer(tiers, (job, 96))
    assert tiers.num_tokens(request("b", 301), 0) == 96


def test_without_free_slots_nothing_is_kept_and_it_is_counted(clock):
    tiers = make(clock, num_slots=3)
    tiers.finished(request("a", 97), 96, table(96))
    assert tiers.finished(request("b", 97, first=500), 96, table(96)) is None
    assert tiers.counts["no_room"] == 1


@pytest.mark.parametrize(("even", "num_tokens", "pays"), [
    (BreakEven(1e-4, 2e-10, 0), 1, True), (BreakEven(1e-6, 2e-7, 0), 1000, False),
    (BreakEven(1e-4, 0, 0, start_s=2e-3), 20, False), (BreakEven(1e-4, 0, 0, start_s=2e-3), 21, True),
    (BreakEven(0, 0, 0), 1000, False),
])  # fmt: skip
def test_it_is_loaded_only_if_that_beats_computing(clock, even, num_tokens, pays):
    tiers = make(clock, break_even=even, bytes_per_token=100)
    save(tiers, request("a", num_tokens + 1))
    assert tiers.num_tokens(request("b", num_tokens + 1), 0) == (num_tokens if pays else 0)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_costs_are_checked(value):
    with pytest.raises(CallerError, match="costs"):
        BreakEven(1e-4, value, 0)


# Retention.


def test_a_priority_survives_a_flood_and_falls_after_its_duration(clock):
    tiers = make(clock, num_slots=8)
    save(tiers, request("kept", 129, arguments={"kvferry.retain": ["0-:90:60s"]}))
    for number in range(5):
        save(tiers, request(f"flood {number}", 129, first=10_000 * (number + 1)))
    assert tiers.num_tokens(request("again", 129), 0) == 128
    assert tiers.num_tokens(request("flooded", 129, first=10_000), 0) == 0
    clock.now += 61
    tiers.take_orders()
    for number in range(5, 8):
        save(tiers, request(f"flood {number}", 129, first=10_000 * (number + 1)))
    assert tiers.num_tokens(request("later", 129), 0) == 0


def test_generated_tokens_have_a_priority_of_their_own(clock):
    tiers = make(clock, num_slots=12)
    long = request("kept", 257, num_prompt=128, arguments={"kvferry.retain": ["0-:90"], "kvferry.decode_priority": 0})
    save(tiers, long)
    save(tiers, request("flood", 257, first=10_000))
    assert tiers.num_tokens(request("again", 257), 0) == 128


def test_bad_hints_are_refused_once_and_the_request_goes_on(clock, caplog):
    tiers = make(clock)
    asked = request("a", 65, arguments={"kvferry.retain": ["0-5:900"], "kvferry.directory": "/tmp/x"})
    assert tiers.num_tokens(asked, 0) == 0
    save(tiers, asked)
    assert tiers.counts["hints_refused"] == 2
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "0-5:900" in told[0]
    assert "priority=900" in told[0]
    assert "directory" in told[1]
    assert tiers.num_tokens(request("b", 65), 0) == 64


def test_what_has_happened_is_told_once(clock):
    tiers = make(clock)
    first = tiers.take_report()
    assert first["counters"] == {}
    assert {name: first["gauges"]["tiers"][name] for name in ("tier_slots_held", "tier_jobs")} == {
        "tier_slots_held": 0, "tier_jobs": 0,
    }  # fmt: skip
    assert tiers.take_report() is None
    save(tiers, request("a", 65))
    tiers.finished(request("b", 65, first=1000), 64, table(64))
    (order,) = tiers.take_orders().jobs
    answer(tiers, (order.job, 0))
    report = tiers.take_report()
    assert report["counters"] == {"tier_saved_tokens": 64, "tier_failures": 1}
    assert set(report["counters"]) <= set(metrics.COUNTERS)
    assert set(report["gauges"]["tiers"]) <= set(metrics.GAUGES)
    assert tiers.take_report() is None


def test_answers_of_ranks_and_steps_add_up():
    first = joined(tallied([Answer(1, 5)]), tallied([Answer(1, 9), Answer(2, 3)]))
    assert first == {1: (2, 5), 2: (1, 3)}
    assert joined({}, first) == first


@given(st.integers(0, 1 << 32))
def test_whatever_is_loaded_was_computed_for_that_prompt(seed):
    TierEngine(seed).play()


def test_engines_do_load_and_are_disturbed():
    """Else the test before proves nothing."""
    engines = [TierEngine(seed) for seed in range(60)]
    loaded = [engine.play() for engine in engines]
    assert sum(loaded) > 1000
    assert sum(map(bool, loaded)) > 20
    seen = sum((engine.seen for engine in engines), Counter())
    assert seen["preemptions while something is open"] > 50, seen
    assert seen["resets while something is open"] > 20, seen
    assert seen["aborts while loading"] > 5, seen


# Windows.


def windowed_table(num_tokens, first):
    """One group that sees all, and one of which the blocks before `first` are gone."""
    (full,) = table(num_tokens)
    return full, tuple(HOLE if at < first else 1000 + block for at, block in enumerate(full))


def copied(tiers, job):
    (order,) = tiers.take_orders().jobs
    assert order.job == job
    assert answer(tiers, (job, order.tokens.stop)) == [job]
    return order


def test_a_prefix_is_found_as_far_as_its_windows_are_there(clock):
    tiers = make(clock, windows=(0, 80))
    asked = request("a", 717, num_prompt=700)
    order = copied(tiers, tiers.finished(asked, 716, windowed_table(716, 19)))
    assert order.absent == (frozenset(), frozenset(range(19)))
    assert tiers.num_tokens(request("b", 717), 0) == 716
    assert tiers.num_tokens(request("c", 700), 0) == 699, "its window begins in block 19"
    assert tiers.num_tokens(request("d", 688), 0) == 687, "in block 19 by one token"
    assert tiers.num_tokens(request("e", 687), 0) == 0, "in block 18"
    tiers.check()


def test_blocks_of_a_prompt_are_copied_as_they_are_computed_and_nothing_twice(clock):
    tiers = make(clock, windows=(0, 80))
    asked = request("a", 301, num_prompt=200)
    first = tiers.computed(asked, Span(0, 96), windowed_table(96, 0))
    second = tiers.computed(asked, Span(96, 192), windowed_table(192, 1))
    last = tiers.finished(asked, 300, windowed_table(300, 6))
    assert tiers.copied_by(second) == Span(96, 192), "kept until its turn comes"
    assert copied(tiers, first).tokens == Span(0, 96)
    assert copied(tiers, second).tokens == Span(96, 192)
    assert copied(tiers, last).tokens == Span(192, 300)
    assert tiers.num_tokens(request("b", 200), 0) == 199
    assert tiers.num_tokens(request("c", 97), 0) == 96
    assert tiers.num_tokens(request("d", 301), 0) == 300
    tiers.check()


def test_a_part_that_was_absent_is_added_to_what_is_there(clock):
    tiers = make(clock, windows=(0, 80))
    copied(tiers, tiers.finished(request("a", 301), 300, windowed_table(300, 6)))
    assert tiers.num_tokens(request("b", 193), 0) == 0
    order = copied(tiers, tiers.finished(request("c", 230), 229, windowed_table(229, 3)))
    assert order.absent == (frozenset(range(3, 7)), frozenset({6}))
    assert tiers.num_tokens(request("d", 193), 0) == 192
    tiers.check()


def test_a_save_behind_one_that_failed_is_not_made(clock):
    tiers = make(clock, windows=(0, 80))
    asked = request("a", 301, num_prompt=200)
    first = tiers.computed(asked, Span(0, 96), windowed_table(96, 0))
    second = tiers.computed(asked, Span(96, 192), windowed_table(192, 1))
    tiers.take_orders()
    assert answer(tiers, (first, 0)) == [first, second], "what it lacks before its own blocks is gone"
    assert tiers.take_orders().jobs == ()
    tiers.check()


@pytest.mark.long
def test_whatever_is_loaded_was_computed_for_that_prompt_long():
    first = int(os.environ.get("KVFERRY_SEED", "0")) << 20
    for seed in range(first, first + 20_000):
        TierEngine(seed).play()
