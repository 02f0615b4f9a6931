"""Forecasts: the worked examples, and against a naive walk through the life of a sequence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import CallerError
from kv_core.scheduling import Demand, Limits, Phase, Progress, blocks_for_next_step, blocks_to_completion
from kv_core.spans import ceil_div

FULL = Limits(window=4096, max_tokens=4096, tokens_per_block=32)
NEW = Progress()


def decoding(num_tokens, num_live=1, **rest):
    return Progress(Phase.DECODING, num_tokens, num_live, **rest)


@pytest.mark.parametrize(("beams", "expected"), [(1, 4), (4, 7)])
def test_needed_for_a_prompt(beams, expected):
    assert blocks_for_next_step(Demand(100, 50, beam_width=beams), FULL, NEW) == expected


@pytest.mark.parametrize(("num_tokens", "num_steps", "expected"), [(128, 1, 1), (127, 1, 0), (127, 2, 1)])
def test_needed_while_decoding(num_tokens, num_steps, expected):
    demand = Demand(100, 50, beam_width=3)
    assert blocks_for_next_step(demand, FULL, decoding(num_tokens), num_steps=num_steps) == 3 * expected


@pytest.mark.parametrize("phase", [Phase.LATER_CONTEXT, Phase.COMPLETE])
def test_other_phases_need_nothing(phase):
    assert blocks_for_next_step(Demand(100, 50), FULL, Progress(phase, 100, 4)) == 0


def test_a_long_prompt_under_a_sliding_window_takes_all_its_blocks():  # core spec D26: 157, not 10
    limits = Limits(window=512, max_tokens=16384, tokens_per_block=64)
    assert blocks_for_next_step(Demand(10000, 100), limits, NEW) == 157
    assert blocks_to_completion(Demand(10000, 100), limits, NEW) == 157


def test_detached_blocks_do_not_count_as_there():  # core spec D26: 0, not -15
    limits = Limits(window=512, max_tokens=16384, tokens_per_block=64)
    assert blocks_to_completion(Demand(100, 2000), limits, decoding(1500, num_live=9)) == 0


def test_a_step_past_the_limit_takes_what_lies_before_it():  # core spec D62: the last block is still allocated
    limits = Limits(window=512, max_tokens=513, tokens_per_block=16)
    demand = Demand(512, 513, draft_tokens=3)
    assert blocks_for_next_step(demand, limits, decoding(512)) == 1
    assert blocks_for_next_step(demand, limits, decoding(513)) == 0


def test_cached_blocks_count_only_while_held():  # core spec D60
    limits = Limits(window=64, max_tokens=64, tokens_per_block=4)
    assert blocks_for_next_step(Demand(8, 4), limits, NEW) == 2
    assert blocks_for_next_step(Demand(8, 4), limits, Progress(num_held_hits=1)) == 1
    assert blocks_to_completion(Demand(8, 4), limits, Progress(num_held_hits=1)) == 2
    assert blocks_to_completion(Demand(8, 4), limits, decoding(8, num_live=2, num_held_hits=1)) == 1


@pytest.mark.parametrize(("beams", "before", "after"), [(1, 7, 3), (4, 19, 12)])
def test_remaining(beams, before, after):
    demand = Demand(100, 100, beam_width=beams)
    assert blocks_to_completion(demand, FULL, NEW) == before
    assert blocks_to_completion(demand, FULL, decoding(100, num_live=4)) == after


def test_cross_cache_holds_the_encoder_and_never_grows():
    limits = Limits(window=64, max_tokens=64, tokens_per_block=4)
    demand = Demand(5, 10, beam_width=2, encoder_tokens=18)
    assert (blocks_for_next_step(demand, limits, NEW), blocks_to_completion(demand, limits, NEW)) == (6, 5)
    assert blocks_for_next_step(demand, limits, decoding(5)) == 0 == blocks_to_completion(demand, limits, decoding(5))


@pytest.mark.parametrize("sizes", [(0, 1), (1, -1)])
def test_refused(sizes):  # core spec D24
    with pytest.raises(CallerError):
        Demand(*sizes)


def live_blocks(num_tokens, prompt, window, tokens_per_block):
    """Live blocks of one beam at each length from the prompt on: detach first, then allocate (core spec 7.4)."""
    detached, live = 0, []
    for length in range(prompt, num_tokens + 1):
        while length > prompt and length - detached * tokens_per_block >= window + tokens_per_block:
            detached += 1
        live.append(ceil_div(length, tokens_per_block) - detached)
    return live


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 50), st.integers(1, 8), st.data())
def test_what_is_forecast_is_enough(prompt, new, window, tokens_per_block, data):
    limits = Limits(window, 200, tokens_per_block)
    demand = Demand(prompt, new)
    live = live_blocks(prompt + new, prompt, window, tokens_per_block)
    before = blocks_to_completion(demand, limits, NEW)
    assert before >= max(live)
    assert before <= max(live) + 1
    at = data.draw(st.integers(0, new))
    after = blocks_to_completion(demand, limits, decoding(prompt + at, live[at]))
    assert after >= max(live[at:]) - live[at]


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 3), st.integers(1, 8))
def test_steps_add_up_to_the_growth(prompt, new, drafts, tokens_per_block):
    limits, demand = Limits(200, 200, tokens_per_block), Demand(prompt, new, drafts)
    length, taken = prompt, ceil_div(prompt, tokens_per_block)
    while length < prompt + new:
        taken += blocks_for_next_step(demand, limits, decoding(length))
        length = min(prompt + new, length + drafts + 1)
    assert taken == ceil_div(prompt + new, tokens_per_block)
