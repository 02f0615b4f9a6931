"""When loading pays: what is given stands, what is not is measured, and no stall carries the estimate away."""

import dataclasses
import logging
import math

import pytest

from kv_core.errors import CallerError
from kv_engine_adapter import metrics
from kv_engine_adapter.tier_config import TierConfig
from kv_engine_adapter.tier_costs import MAX_GROWTH, MAX_START_S, MAX_TOKEN_S, TierCosts
from kv_engine_adapter.tier_orders import Rates, slowest
from kv_engine_adapter.tier_terms import COSTS, BreakEven, TierTerms
from kv_testing.tier_calls import Clock, make, request, save

ASSUMED = BreakEven(1e-4, 2e-10, 2e-9)
ALL = frozenset(COSTS)
BYTES = 1000


@pytest.fixture
def clock():
    return Clock()


def costs(clock, measured=ALL, **more):
    return TierCosts(
        TierTerms(tokens_per_block=32, num_slots=40, bytes_per_token=BYTES, max_tokens=4096, num_ranks=1,
                  break_even=ASSUMED, measured=measured, **more), clock,
    )  # fmt: skip


def step(of, clock, took_s, num_prompt, num_tokens=None):
    of.step_began(num_prompt, num_prompt if num_tokens is None else num_tokens)
    clock.now += took_s
    of.step_ended()


def test_what_is_given_is_not_measured(clock):
    of = costs(clock, measured=frozenset())
    of.heard(Rates(1.0, 1.0))
    step(of, clock, 1.0, 1000)
    step(of, clock, 1.0, 0, 5)
    assert of.break_even == ASSUMED


def test_settings_take_the_place_of_measurements():
    assert TierConfig().measured == ALL
    some = TierConfig(tier_host_byte_s=0.0, tier_start_s=1.0)
    assert some.measured == {"recompute_token_s", "disk_byte_s"}
    assert some.break_even == dataclasses.replace(ASSUMED, host_byte_s=0.0, start_s=1.0)
    with pytest.raises(CallerError, match="costs are measured"):
        TierTerms(tokens_per_block=32, num_slots=40, bytes_per_token=BYTES, max_tokens=4096, num_ranks=1,
                  break_even=ASSUMED, measured=frozenset({"patience"}))  # fmt: skip


def test_the_slowest_rank_counts(clock):
    of = costs(clock, has_disk=True)
    of.heard(Rates(4e-6, None))
    of.heard(Rates(None, 2e-5))
    of.heard(Rates(2e-6, 3e-5))
    assert of.break_even.host_byte_s == pytest.approx(4e-9)
    assert of.break_even.disk_byte_s == pytest.approx(3e-8)
    assert slowest(Rates(1.0, None), Rates(2.0, 3.0)) == (2.0, 3.0)
    assert slowest(Rates(), Rates()) == (None, None)


def test_a_measurement_may_be_lower_than_what_was_assumed(clock):
    of = costs(clock)
    of.heard(Rates(1e-9, 1e-9))
    assert of.break_even.host_byte_s == pytest.approx(1e-12)


def test_what_computing_costs_is_learned_from_prompts(clock):
    of = costs(clock)
    for _ in range(60):
        step(of, clock, 0.3, 1000)
        clock.now += 100  # idle
    assert of.break_even.recompute_token_s == pytest.approx(3e-4, rel=0.01)
    for _ in range(60):
        step(of, clock, 0.02, 1000)
    assert of.break_even.recompute_token_s == pytest.approx(2e-5, rel=0.01)


@pytest.mark.parametrize(("num_prompt", "num_tokens"), [(40, 40), (100, 300)])
def test_steps_that_hardly_compute_prompts_tell_nothing(clock, num_prompt, num_tokens):
    of = costs(clock)
    step(of, clock, 1.0, num_prompt, num_tokens)
    assert of.break_even == ASSUMED


def test_a_stall_counts_little(clock):
    of = costs(clock)
    for _ in range(30):
        step(of, clock, 0.1, 1000)
    step(of, clock, 600.0, 1000)
    assert of.break_even.recompute_token_s <= 1e-4 * (1 + 0.2 * MAX_GROWTH)
    for _ in range(100):
        step(of, clock, 600.0, 1000)
        step(of, clock, 600.0, 0, 1)
    assert of.break_even.recompute_token_s <= MAX_TOKEN_S
    assert of.break_even.start_s <= MAX_START_S


def test_steps_that_were_ordered_ahead_count_from_the_end_of_the_one_before(clock):
    of = costs(clock)
    of.step_began(1000, 1000)
    for _ in range(60):
        of.step_began(1000, 1000)
        clock.now += 0.1
        of.step_ended()
    assert of.break_even.recompute_token_s == pytest.approx(1e-4, rel=0.01)
    of.step_ended()
    of.step_ended()
    assert of.break_even.recompute_token_s < 1e-4, "what ends after its end is known took no time"


@pytest.mark.parametrize(("even", "expected"), [
    (BreakEven(1e-4, 0, 0, start_s=2.03e-3), 21), (BreakEven(1e-4, 2e-8, 0), 1), (BreakEven(1e-4, 2e-7, 0), math.inf),
    (BreakEven(1e-4, 5e-8, 0, start_s=1.02e-3), 21),
])  # fmt: skip
def test_the_break_even_point_is_where_it_begins_to_pay(even, expected):
    found = even.from_tokens(BYTES, from_disk=False)
    assert found == expected
    assert not even.pays(min(int(min(found, 1e6)) - 1, 10**6), BYTES, from_disk=False)
    assert even.pays(10**6, BYTES, from_disk=False) == (found < math.inf)


def test_it_is_shown_and_logged_once(clock, caplog):
    of = costs(clock, has_disk=True)
    caplog.set_level(logging.INFO)
    of.heard(Rates(1e-5, 2e-5))
    assert not caplog.records
    step(of, clock, 0.1, 1000)
    step(of, clock, 0.1, 1000)
    step(of, clock, 0.001, 0, 4)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "pays from 1 tokens of host memory (1e-05 s a token)" in line
    assert "from 1 tokens of disk (2e-05 s)" in line
    gauges = of.gauges()
    assert set(gauges) <= set(metrics.GAUGES)
    assert gauges["tier_recompute_token_s"] == 1e-4
    assert gauges["tier_host_token_s"] == 1e-5
    assert gauges["tier_break_even_host_tokens"] == 3
    assert gauges["tier_break_even_disk_tokens"] == 3


def test_tiers_load_as_the_costs_say(clock):
    tiers = make(clock, break_even=ASSUMED, measured=ALL, bytes_per_token=BYTES)
    save(tiers, request("a", 201))
    assert tiers.num_tokens(request("b", 201), 0) == 200
    tiers.costs.heard(Rates(1e-2, None))
    assert tiers.num_tokens(request("c", 201), 0) == 0
    assert tiers.take_report()["gauges"]["tiers"]["tier_break_even_host_tokens"] == math.inf
