"""Random pairs of layouts with real caches: every element arrives in its place, once, and nothing else is touched.

The usual run moves the bytes of the same 2,000 pairs as the plan's own test, the long run those of 18,000 more.
"""

from random import Random

import pytest

from kv_core.spans import Span
from kv_testing.carrier import chunks_between
from kv_testing.layouts import random_pair
from kv_testing.tagged import draw_form, fill, make_world, misplaced
from kv_transfer.plan.plan import widened

pytestmark = pytest.mark.drawn

SHORT, LONG, PAIRS_PER_TEST = 2000, 20_000, 100


def batches(start, stop):
    return [range(first, first + PAIRS_PER_TEST) for first in range(start, stop, PAIRS_PER_TEST)]


@pytest.mark.parametrize(
    "seeds",
    [*batches(0, SHORT), *(pytest.param(seeds, marks=pytest.mark.long) for seeds in batches(SHORT, LONG))],
    ids=lambda seeds: f"from{seeds.start}",
)
def test_every_element_arrives_in_its_place(seeds):
    for seed in seeds:
        sender, receiver, tokens = worlds(seed)
        for dense, concat in moves_of(sender, receiver, random_pair(seed), spread=seed):
            concat(dense)
        assert misplaced(receiver, tokens, random_pair(seed).receiver_group) == 0, f"seed={seed}"


@pytest.mark.parametrize("seed", [seed for seed in range(25) if random_pair(seed).tokens])
def test_one_wrong_byte_shows(seed):
    """Negative control: any single bit flipped on the wire."""
    sender, receiver, tokens = worlds(seed)
    moves = list(moves_of(sender, receiver, random_pair(seed), spread=0))
    random = Random(seed)
    for number in {0, len(moves) - 1, random.randrange(len(moves))}:
        dense, concat = moves[number]
        position = random.randrange(len(dense))
        dense[position] ^= 1 << random.randrange(8)
    for dense, concat in moves:
        concat(dense)
    assert misplaced(receiver, tokens, random_pair(seed).receiver_group) >= 1


def test_a_lost_chunk_and_a_wrong_block_show():
    """Negative control: the checker sees what is missing, and what lies in another block of the same request."""
    seed = next(seed for seed in range(1000) if is_simple(random_pair(seed)) and len(list(chunks_of_pair(seed))) > 2)
    sender, receiver, tokens = worlds(seed)
    moves = list(moves_of(sender, receiver, random_pair(seed), spread=0))
    for dense, concat in moves[1:]:
        concat(dense)
    assert misplaced(receiver, tokens, random_pair(seed).receiver_group) > 0
    moves[0][1](moves[0][0])
    assert misplaced(receiver, tokens, random_pair(seed).receiver_group) == 0
    plane = next(caches.planes[0] for caches in receiver.caches.values() if caches.planes)
    first, second = receiver.table[-2:]
    plane[[first, second]] = plane[[second, first]]
    assert misplaced(receiver, tokens, random_pair(seed).receiver_group) > 0


def is_simple(pair):
    """Whether rank 0 of the receiver holds several blocks of all tokens that travel."""
    cut, size = pair.receiver.parallel, pair.receiver.tokens_per_block
    is_alone = cut.num_context_ranks == cut.num_groups == 1 and not pair.receiver.windows
    return bool(
        is_alone and cut.layers[0] and pair.tokens.start and pair.tokens.stop // size > 1 + pair.tokens.start // size
    )


def chunks_of_pair(seed):
    sender, receiver, _ = worlds(seed)
    return moves_of(sender, receiver, random_pair(seed), spread=0)


def worlds(seed):
    """Sender full of tags, receiver full of filler, and the tokens that the receiver will hold."""
    pair, random = random_pair(seed), Random(seed)
    tokens = widened(pair.tokens, pair.sender)
    sender = make_world(pair.sender, tokens.stop, draw_form(random.randint, pair.sender), seed)
    receiver = make_world(pair.receiver, tokens.stop, draw_form(random.randint, pair.receiver), seed + 1)
    fill(sender, Span(0, tokens.stop), pair.sender_group)
    return sender, receiver, tokens


def moves_of(sender, receiver, pair, spread):
    groups = {"from_group": pair.sender_group, "to_group": pair.receiver_group, "most_layers": pair.most_layers}
    return chunks_between(sender, receiver, pair.tokens, pair.max_bytes, spread, **groups)
