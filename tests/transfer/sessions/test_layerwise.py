"""The first layers of a step travel while the others are computed, if the engine tells of them and the receiver asks.

What has arrived is counted in bytes, against the rules of the spec (`tagged.wanted`), never by time.
"""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from kv_core.errors import CallerError
from kv_core.ids import RequestId
from kv_core.spans import Span
from kv_testing.engine_process import make_nixl_side
from kv_testing.growing import EVERY_PATH, GrowingPrompt, given_up_while_read, steps, world_of
from kv_testing.hangs import planted
from kv_testing.layouts import make_state
from kv_testing.tagged import wanted
from kv_testing.waiting import wait_for
from kv_testing.worlds import ALL, FAST, NUM_TOKENS, PROMPT, Switches, pair, sides, state_of
from kv_transfer.orders import Offer
from kv_transfer.plan.cache_state import ParallelLayout
from kv_transfer.plan.frontier import Ahead, Frontier

BY_LAYERS = replace(FAST, layers_per_chunk=1)
QUIET = replace(FAST, nudge_s=60.0, nudge_limit_s=60.0)
"""Nothing is said twice."""
NUM_LAYERS = 4
FIRST = 16
"""So many tokens are computed when the last step begins: whole blocks of every shape here."""


def latent(tp=1, stages=(4,)):
    parallel = ParallelLayout.even(tp, list(stages), 1)
    usual = {"dtype": "float32", "head_size": 8, "num_planes": 1, "num_kv_heads": 1, "tokens_per_block": 4}
    return make_state(**usual, attention="latent", parallel=parallel)


def hybrid(tp=1, stages=(4,), **cut):
    parallel = ParallelLayout.even(tp, list(stages), 4, **cut)
    return make_state(dtype="float32", head_size=4, tokens_per_block=4, windows=(0, 9, 0, 9), parallel=parallel)


SHAPES = {
    "tp1-tp1": (state_of(), state_of()),
    "tp2-tp1": (state_of(2), state_of()),
    "pp2-pp1": (state_of(stages=(2, 2)), state_of()),
    "pp1-pp2": (state_of(), state_of(stages=(1, 3))),
    "other blocks": (state_of(tokens_per_block=8), state_of(2, tokens_per_block=4, order="token_major")),
    "windows": (hybrid(), hybrid(2)),
    "windows, pp, cp": (hybrid(stages=(1, 3), cp=2, context_cut="round_robin"), hybrid()),
    "latent": (latent(2), latent(stages=(2, 2))),
}


@contextmanager
def in_last_step(p, d, first=FIRST):
    """All but the last step of a prompt are computed, and have arrived."""
    prompt = GrowingPrompt(p).open(first)
    d.order(p, prompt.transfer_id)
    wait_for_bytes(d, bytes_of(d, first), "what is computed")
    yield prompt
    d.check_clean()
    p.check_clean()


def bytes_of(side, num_computed, layer_stop=0, token_stop=0):
    """Of all that its ranks want of the prompt so much is computed."""
    state, num_bytes = side.world.state, 0
    for rank in state.parallel.ranks:
        counts = wanted(state, rank, ALL, NUM_TOKENS)
        layers, _, tokens = np.ogrid[tuple(map(slice, counts.shape))]
        is_computed = (tokens < num_computed) | (layers < layer_stop) & (tokens < token_stop)
        num_bytes += int((counts * is_computed).sum()) * state.num_planes * state.bytes_per_token_head
    return num_bytes


def wait_for_bytes(side, num_bytes, what):
    """So many are scattered, over all ranks."""
    wait_for(lambda: side.count("bytes_in") == num_bytes, what=what)


def end(p, d, prompt):
    """The last step ends, and with it the prompt."""
    prompt.advance(NUM_TOKENS)
    received = d.outcomes(others=[p])
    assert all(each.ok for each in received), received
    assert d.misplaced() == 0
    assert d.count("bytes_in") == bytes_of(d, NUM_TOKENS), "every element moves once"
    prompt.complete()
    d.release(p, prompt.transfer_id)


@pytest.mark.parametrize(("prefill", "decode"), SHAPES.values(), ids=SHAPES)
def test_all_but_the_last_layer_of_a_step_arrive_before_it_ends(prefill, decode):
    with pair(prefill, decode, config=BY_LAYERS) as (p, d, _), in_last_step(p, d) as prompt:
        for layer_stop in range(1, NUM_LAYERS):
            prompt.advance_layers(FIRST, Ahead(layer_stop, NUM_TOKENS))
            wait_for_bytes(d, bytes_of(d, FIRST, layer_stop, NUM_TOKENS), f"{layer_stop} layers of the last step")
            steps(d)
            assert max(d.arrived.values()) < NUM_TOKENS, "the last layer lacks something"
        end(p, d, prompt)


@pytest.mark.nixl
def test_over_nixl():
    p, d = (make_nixl_side(name, state_of(), BY_LAYERS, None, Switches()) for name in ("p", "d"))
    with sides(p, d), in_last_step(p, d) as prompt:
        prompt.advance_layers(FIRST, Ahead(3, NUM_TOKENS))
        wait_for_bytes(d, bytes_of(d, FIRST, 3, NUM_TOKENS), "three layers of the last step")
        end(p, d, prompt)


def test_what_is_read_before_its_layer_is_computed_shows(monkeypatch):
    """Negative control: layers are not looked at, and whatever has a token ahead is read."""
    monkeypatch.setattr(Frontier, "covers", lambda self, tokens, layers=None: tokens.stop <= self.stop)
    with pair(config=BY_LAYERS) as (p, d, _):
        prompt = GrowingPrompt(p).open(FIRST)
        d.order(p, prompt.transfer_id)
        prompt.advance_layers(FIRST, Ahead(1, NUM_TOKENS))
        assert d.outcome(others=[p]).ok
        assert d.misplaced() == (NUM_LAYERS - 1) * (NUM_TOKENS - FIRST) * 2 * 4 * 4, "three layers of the last step"
        prompt.abandon()


@pytest.mark.parametrize("path", EVERY_PATH)
def test_steps_of_several_layers_on_every_path(path):
    """What is read where it lies is read at once, when all is computed; chunks of two layers each."""
    with world_of(path, state_of(2), config=replace(FAST, layers_per_chunk=2)) as (p, d, _):
        prompt = GrowingPrompt(p).open(3)
        d.order(p, prompt.transfer_id)
        for num_computed, stop in ((3, 17), (17, 18), (18, NUM_TOKENS)):
            for layer_stop in (1, 2, 4):
                prompt.advance_layers(num_computed, Ahead(layer_stop, stop))
            prompt.advance(stop)
        assert d.outcome(others=[p]).ok
        assert d.misplaced() == 0
        prompt.complete()
        d.release(p, prompt.transfer_id)
        d.check_clean()
        p.check_clean()


@pytest.mark.parametrize(
    ("layers_per_chunk", "stops", "path"),
    [
        (0, (), "staged"),
        (1, (1, 2, 3), "staged"),
        (2, (2,), "staged"),
        (3, (3,), "staged"),
        (4, (), "staged"),
        (1, (), "direct"),
    ],
)
def test_only_who_can_use_a_layer_hears_of_it(layers_per_chunk, stops, path):
    faults = Switches()
    config = replace(QUIET, layers_per_chunk=layers_per_chunk, chunk_bytes=1 << 16)
    with world_of(path, config=config, prefill_faults=faults) as (p, d, _):
        prompt = GrowingPrompt(p).open(0)
        d.order(p, prompt.transfer_id)
        wait_for(lambda: faults.num_said["Ready"] == 1, what="the answer to the Ask")
        for layer_stop in range(1, NUM_LAYERS):
            prompt.advance_layers(0, Ahead(layer_stop, NUM_TOKENS))
        end(p, d, prompt)
        assert faults.num_said["Ready"] == 1 + len(stops) + 1
        d.check_clean()
        p.check_clean()


def test_layers_may_be_lost_or_come_late():
    faults = Switches(dropped={"Ready"})
    with pair(config=BY_LAYERS, prefill_faults=faults) as (p, d, _):
        prompt = GrowingPrompt(p).open(FIRST)
        d.order(p, prompt.transfer_id)
        prompt.advance_layers(FIRST, Ahead(3, NUM_TOKENS))
        wait_for(lambda: faults.num_said["Ready"] > 1, what="two lost Readys")
        faults.dropped.clear()
        wait_for_bytes(d, bytes_of(d, FIRST, 3, NUM_TOKENS), "the answer to another Ask")
        end(p, d, prompt)
        d.check_clean()
        p.check_clean()


def test_a_layer_that_is_granted_too_early_is_refused(monkeypatch):
    monkeypatch.setattr("kv_transfer.ungranted.needed", lambda chunk, tokens: Span(0, 0))
    with pair(config=BY_LAYERS) as (p, d, _):
        prompt = GrowingPrompt(p).open(0)
        prompt.advance_layers(0, Ahead(1, NUM_TOKENS))
        d.order(p, prompt.transfer_id)
        told = d.outcome(others=[p]).reason
        assert "granted too early" in told
        assert "computed=[0, 0) and of layers [0, 1) [0, 40), wanted=[0, 4) of layers [1, 2)" in told
        prompt.abandon()
        d.check_clean()
        p.check_clean()


# -- prompts that are given up in the middle of a step ----------------------------------------------------------------


def test_a_prompt_that_is_given_up_within_a_step_says_so():
    with pair(config=BY_LAYERS) as (p, d, _), in_last_step(p, d) as prompt:
        prompt.advance_layers(FIRST, Ahead(2, NUM_TOKENS))
        prompt.abandon("preempted")
        told = d.outcome(others=[p]).reason
        assert "gone: preempted: computed=[0, 16) and of layers [0, 2) [0, 40) of [0, 40), wanted=[0, 40)" in told


def test_a_layer_that_was_read_after_the_end_is_not_written():
    with pair(config=BY_LAYERS) as (p, d, _):
        prompt = GrowingPrompt(p).open(0)
        prompt.advance_layers(0, Ahead(3, NUM_TOKENS))
        given_up_while_read(p, d, prompt)


def test_an_equal_prompt_that_is_behind_goes_on_within_its_own_step():
    """What was read of layers that were taken back is read again, once they are computed again."""
    with pair(config=BY_LAYERS) as (p, d, _):
        prompt = GrowingPrompt(p).open(8)
        prompt.advance_layers(8, Ahead(3, NUM_TOKENS))
        with planted(p.cores[0].sender.passages._copier, "_parts") as gather:
            gather.hang()
            d.order(p, prompt.transfer_id)
            gather.wait_until_met()
            other = GrowingPrompt(p, RequestId("p1"), prompt.transfer_id).open(4)
            prompt.give_up()
        wait_for_bytes(d, bytes_of(d, 4), "what the other has computed")
        other.advance_layers(4, Ahead(2, NUM_TOKENS))
        wait_for_bytes(d, bytes_of(d, 4, 2, 8), "two layers of the other's step, where all were told")
        end(p, d, other)
        wait_for(lambda: p.step() == [(0, "p1")], what="the end of the other")
        d.check_clean()
        p.check_clean()


# -- what an engine may not say ---------------------------------------------------------------------------------------


def say(num_computed, ahead, rank=0):
    return lambda prompt: prompt.side.ranks[rank].advance(
        prompt.request_id, num_computed, prompt.tables(rank, NUM_TOKENS).by_group, ahead
    )


def with_too_few_blocks(prompt):
    """As many as whole tokens need."""
    tables = prompt.tables(0, 16).by_group
    prompt.side.ranks[0].advance(prompt.request_id, 16, tables, Ahead(2, 24))


WRONG = {
    "no layers": (say(16, None), r"told before=\[0, 16\) and of layers \[0, 1\) \[0, 24\), told now=\[0, 16\)"),
    "fewer tokens": (say(20, None), r"of layers \[0, 1\) \[0, 24\), told now=\[0, 20\)"),
    "fewer tokens of layers": (say(16, Ahead(2, 20)), r"told now=\[0, 16\) and of layers \[0, 2\) \[0, 20\)"),
    "fewer layers": (say(16, Ahead(1, 24), rank=1), r"ours=\[2, 4\), ahead to=1"),
    "layers of another stage": (say(16, Ahead(3, 24)), r"ours=\[0, 2\), ahead to=3"),
    "tokens that are computed": (say(24, Ahead(1, 24)), "computed=24, prompt=40, ahead to=24"),
    "tokens beyond the prompt": (say(16, Ahead(1, 41)), "computed=16, prompt=40, ahead to=41"),
    "too few blocks": (with_too_few_blocks, "tokens=24, blocks wanted=6, held=4"),
}


@pytest.mark.parametrize(("call", "why"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_refused_and_changes_nothing(call, why):
    with pair(state_of(stages=(2, 2)), config=BY_LAYERS) as (p, d, _):
        prompt = GrowingPrompt(p).open(FIRST)
        prompt.advance_layers(FIRST, Ahead(1, 24))
        with pytest.raises(CallerError, match=why):
            call(prompt)
        d.order(p, prompt.transfer_id)
        wait_for_bytes(d, bytes_of(d, FIRST, 1, 24), "what was said before")
        end(p, d, prompt)
        d.check_clean()
        p.check_clean()


def test_a_prompt_whose_layers_are_told_is_not_complete_before_its_tokens_are():
    with pair(config=BY_LAYERS) as (p, _, _):
        prompt = GrowingPrompt(p).open(FIRST)
        prompt.advance_layers(FIRST, Ahead(NUM_LAYERS, NUM_TOKENS))
        with pytest.raises(CallerError, match="computed=16, prompt=40"):
            p.ranks[0].complete(prompt.request_id)
        prompt.abandon()
        steps(p)
        p.check_clean()


def test_chunks_of_layers_wait_for_the_first_work_that_fills_them(monkeypatch):
    """Of all the events with which an engine tells of layers, the earliest that says so."""
    events, after = [], []
    with pair(config=BY_LAYERS) as (p, d, _):
        rank = p.ranks[0]
        prompt = GrowingPrompt(p)
        prompt.compute(NUM_TOKENS)

        def mark():
            events.append(len(events))
            return events[-1]

        monkeypatch.setattr(rank._offering, "_mark", mark)
        submit = rank._mover.submit

        def noted(run, filled, *args, **named):
            after.append(filled)
            submit(run, None, *args, **named)

        monkeypatch.setattr(rank._mover, "submit", noted)
        p.door.open_offer(prompt.transfer_id, prompt.request_id, PROMPT)
        rank.offer(Offer(prompt.transfer_id, prompt.request_id, PROMPT, prompt.tables(0, 4), 4))
        for layer_stop in (1, 3):
            say(4, Ahead(layer_stop, 8))(prompt)
        say(NUM_TOKENS, None)(prompt)
        d.order(p, prompt.transfer_id)
        assert d.outcome(others=[p]).ok
        first = [0] * NUM_LAYERS + [1, 2, 2, 3]
        assert after == first + [3] * (len(after) - len(first))
        assert len(after) == NUM_LAYERS * NUM_TOKENS // 4
        prompt.complete()
        d.release(p, prompt.transfer_id)
        p.check_clean()
