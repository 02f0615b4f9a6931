"""Random pairs of layouts with real caches: every element arrives in its place, once, and nothing else is touched.

The usual run moves the bytes of the same 2,000 pairs as the plan's own test, the long run those of 8,000 more.
"""

from random import Random

import pytest
import torch

from kv_core.spans import Span
from kv_testing.layouts import random_pair
from kv_testing.tagged import draw_form, fill, make_world, misplaced
from kv_transfer.formatter.select import formatter_for
from kv_transfer.plan.plan import chunks_of, receive_plans, widened
from kv_transfer.plan.ranges import block_range

SHORT, LONG, PAIRS_PER_TEST = 2000, 10_000, 100


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
        for dense, concat in chunks_between(sender, receiver, random_pair(seed), spread=seed):
            concat(dense)
        assert misplaced(receiver, tokens) == 0, f"seed={seed}"


@pytest.mark.parametrize("seed", [seed for seed in range(25) if random_pair(seed).tokens])
def test_one_wrong_byte_shows(seed):
    """Negative control: any single bit flipped on the wire."""
    sender, receiver, tokens = worlds(seed)
    moves = list(chunks_between(sender, receiver, random_pair(seed), spread=0))
    random = Random(seed)
    for number in {0, len(moves) - 1, random.randrange(len(moves))}:
        dense, concat = moves[number]
        position = random.randrange(len(dense))
        dense[position] ^= 1 << random.randrange(8)
    for dense, concat in moves:
        concat(dense)
    assert misplaced(receiver, tokens) >= 1


def test_a_lost_chunk_and_a_wrong_block_show():
    """Negative control: the checker sees what is missing, and what lies in another block of the same request."""
    seed = next(seed for seed in range(100) if len(list(chunks_of_pair(seed))) > 2 and random_pair(seed).tokens.start)
    sender, receiver, tokens = worlds(seed)
    moves = list(chunks_between(sender, receiver, random_pair(seed), spread=0))
    for dense, concat in moves[1:]:
        concat(dense)
    assert misplaced(receiver, tokens) > 0
    moves[0][1](moves[0][0])
    assert misplaced(receiver, tokens) == 0
    plane = next(caches.planes[0] for caches in receiver.caches.values() if caches.planes)
    first, second = receiver.table[-2:]
    plane[[first, second]] = plane[[second, first]]
    assert misplaced(receiver, tokens) > 0


def chunks_of_pair(seed):
    sender, receiver, _ = worlds(seed)
    return chunks_between(sender, receiver, random_pair(seed), spread=0)


def worlds(seed):
    """Sender full of tags, receiver full of filler, and the tokens that the receiver will hold."""
    pair, random = random_pair(seed), Random(seed)
    tokens = widened(pair.tokens, pair.sender)
    sender = make_world(pair.sender, tokens.stop, draw_form(random.randint, pair.sender), seed)
    receiver = make_world(pair.receiver, tokens.stop, draw_form(random.randint, pair.receiver), seed + 1)
    fill(sender, Span(0, tokens.stop))
    return sender, receiver, tokens


def chunks_between(sender, receiver, pair, spread):
    """Yields (dense bytes of a chunk, the function that concatenates them at its receiver)."""
    formatter = formatter_for(pair.sender)
    for rank in receiver.caches:
        for plan in receive_plans(pair.receiver, rank, pair.sender, pair.tokens, spread):
            for chunk in chunks_of(plan.pieces, plan.tokens, pair.sender, pair.max_bytes):
                dense = torch.empty(chunk.num_bytes, dtype=torch.uint8)
                blocks = block_range(sender.table, chunk.tokens, pair.sender.tokens_per_block)
                formatter.split(chunk, sender.caches[plan.sender], blocks, dense)
                yield dense, concatenation(formatter, chunk, receiver, rank)


def concatenation(formatter, chunk, receiver, rank):
    blocks = block_range(receiver.table, chunk.tokens, receiver.state.tokens_per_block)
    return lambda dense: formatter.concat(chunk, receiver.caches[rank], blocks, dense)
