"""How far a prompt is computed, against the set of (layer, token) that it stands for."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.spans import Span
from kv_testing.strategies import layout_pairs
from kv_transfer.plan.frontier import EVERY_LAYER, NOTHING, Ahead, Frontier
from kv_transfer.plan.plan import chunks_of, needed, receive_plans
from kv_transfer.ungranted import Ungranted

NUM_LAYERS, NUM_TOKENS = 6, 9

aheads = st.none() | st.builds(Ahead, st.integers(1, NUM_LAYERS), st.integers(1, NUM_TOKENS))
frontiers = st.builds(Frontier, st.integers(0, NUM_TOKENS), aheads)


@st.composite
def boxes(draw):
    """(layers, tokens), neither empty."""
    layer, token = draw(st.integers(0, NUM_LAYERS - 1)), draw(st.integers(0, NUM_TOKENS - 1))
    return Span(layer, draw(st.integers(layer + 1, NUM_LAYERS))), Span(token, draw(st.integers(token + 1, NUM_TOKENS)))


def computed(frontier):
    """Every (layer, token) of a model of six layers that is."""
    everywhere = {(layer, token) for layer in range(NUM_LAYERS) for token in range(frontier.num_computed)}
    if (ahead := frontier.ahead) is None:
        return everywhere
    return everywhere | {(layer, token) for layer in range(ahead.layer_stop) for token in range(ahead.token_stop)}


@given(frontiers, boxes())
def test_a_box_is_covered_if_each_of_its_parts_is_computed(frontier, box):
    layers, tokens = box
    parts = {(layer, token) for layer in layers for token in tokens}
    assert frontier.covers(tokens, layers) == (parts <= computed(frontier))


@given(frontiers, st.integers(1, NUM_TOKENS))
def test_of_all_layers_only_whole_tokens_count(frontier, stop):
    assert frontier.covers(Span(0, stop), EVERY_LAYER) == (stop <= frontier.num_computed)
    assert frontier.covers(Span(0, stop)) == (stop <= frontier.num_computed)


@given(frontiers, frontiers)
def test_one_includes_another_that_stands_for_less(one, other):
    """Of what is ahead at all: an engine says nothing else."""
    one, other = (each._replace(ahead=each.ahead if each.stop > each.num_computed else None) for each in (one, other))
    assert one.includes(other) == (computed(other) <= computed(one))


@given(st.lists(frontiers, min_size=1, max_size=5), boxes())
def test_what_several_have_told_is_what_one_of_them_has(told, box):
    """So a sender need only ask whether one of those that it told covers a chunk; and none is ahead of all of them."""
    known, (layers, tokens) = NOTHING, box
    for each in told:
        known = known.with_(each)
        assert known.includes(Frontier(each.num_computed)), "whole tokens are never taken back"
    if known.covers(tokens, layers):
        assert any(each.covers(tokens, layers) for each in told)


@given(st.integers(0, NUM_TOKENS), st.data())
def test_along_a_prompt_nothing_that_was_told_is_forgotten(num_computed, data):
    """Whatever the order in which it is heard of."""
    chain, stop = [Frontier(num_computed)], num_computed
    while stop < NUM_TOKENS:
        stop = data.draw(st.integers(stop + 1, NUM_TOKENS))
        chain += [Frontier(chain[-1].num_computed, Ahead(layer, stop)) for layer in range(1, NUM_LAYERS)]
        chain.append(Frontier(stop))
    assert all(later.includes(sooner) for sooner, later in pairwise(chain))
    heard = data.draw(st.permutations(chain))[: data.draw(st.integers(1, len(chain)))]
    known = NOTHING
    for each in heard:
        known = known.with_(each)
    assert computed(known) == set().union(*map(computed, heard))


@given(layout_pairs(), st.data())
def test_the_next_chunk_is_the_first_that_is_computed_and_not_granted(pair, data):
    for plan in receive_plans(pair.receiver, pair.receiver.parallel.ranks[0], pair.sender, pair.tokens):
        chunks = chunks_of(plan.pieces, plan.tokens, pair.sender, pair.max_bytes, pair.most_layers)
        ungranted, left = Ungranted(chunks, plan.tokens), set(range(len(chunks)))
        num_computed = 0
        while num_computed < plan.tokens.stop:
            step = data.draw(st.integers(num_computed + 1, plan.tokens.stop))
            for layer in sorted(data.draw(st.sets(st.integers(1, pair.sender.num_layers), max_size=3))):
                grant_some(ungranted, left, chunks, plan.tokens, Frontier(num_computed, Ahead(layer, step)), data)
            num_computed = step
            grant_some(ungranted, left, chunks, plan.tokens, Frontier(num_computed), data)
        grant_some(ungranted, left, chunks, plan.tokens, Frontier(num_computed), None)
        assert not left, "all of them, once all is computed"


def grant_some(ungranted, left, chunks, tokens, frontier, data):
    """So many as memory is drawn for; all of them if none is drawn."""
    for _ in range(len(left) if data is None else data.draw(st.integers(0, 3))):
        fitting = [
            seq for seq in sorted(left) if frontier.covers(needed(chunks[seq], tokens), chunks[seq].piece.layers)
        ]
        assert ungranted.next(frontier) == (fitting[0] if fitting else None)
        if fitting:
            ungranted.grant(fitting[0])
            left.discard(fitting[0])


@pytest.mark.parametrize(
    ("frontier", "text", "stop"),
    [
        (Frontier(12), "[0, 12)", 12),
        (Frontier(12, Ahead(3, 16)), "[0, 12) and of layers [0, 3) [0, 16)", 16),
        (Frontier(12, Ahead(3, 8)), "[0, 12) and of layers [0, 3) [0, 8)", 12),
    ],
)
def test_it_says_both(frontier, text, stop):
    assert (str(frontier), frontier.stop) == (text, stop)
