"""2,000 random pairs of layouts, planned only: every (layer, head, token) travels exactly once; a wrong plan shows."""

import pytest

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.layouts import random_pair
from kv_testing.tagged import moves, wanted
from kv_transfer.plan.plan import Chunk, Piece, chunks_of, receive_plans, widened

pytestmark = pytest.mark.drawn

NUM_PAIRS, PAIRS_PER_TEST = 2000, 100


@pytest.mark.parametrize("first", range(0, NUM_PAIRS, PAIRS_PER_TEST))
def test_every_part_travels_exactly_once(first):
    for seed in range(first, first + PAIRS_PER_TEST):
        pair = random_pair(seed)
        for rank in pair.receiver.parallel.ranks_of(pair.receiver_group):
            assert travels_once(pair, rank, chunks_for(pair, rank)), f"seed={seed}, rank={rank}"


def test_the_draws_reach_what_they_promise():
    pairs = [random_pair(seed) for seed in range(NUM_PAIRS)]
    promises = {
        "tensor ranks that do not divide each other": lambda s, r: (
            len(s.heads) % len(r.heads) and len(r.heads) % len(s.heads)
        ),
        "empty stages of the sender": lambda s, r: not all(s.layers),
        "empty stages of the receiver": lambda s, r: not all(r.layers),
        "copies at both": lambda s, r: len(set(s.heads)) < len(s.heads) and len(set(r.heads)) < len(r.heads),
        "partial overlap": lambda s, r: any(a & b and a != b for a in s.heads for b in s.heads),
        "more ranks at the sender": lambda s, r: s.num_ranks > r.num_ranks,
        "more ranks at the receiver": lambda s, r: s.num_ranks < r.num_ranks,
        "context ranks on both sides": lambda s, r: s.num_context_ranks > 1 and r.num_context_ranks > 1,
        "round robin at one side only": lambda s, r: (
            s.num_context_ranks > 1 < r.num_context_ranks and s.context_cut != r.context_cut
        ),
        "groups on both sides": lambda s, r: s.num_groups > 1 < r.num_groups,
        "other numberings": lambda s, r: s.numbering != r.numbering and s.num_context_ranks > 1,
    }
    for what, holds in promises.items():
        assert sum(bool(holds(p.sender.parallel, p.receiver.parallel)) for p in pairs) > 50, what
    assert sum(p.sender.tokens_per_block > p.receiver.tokens_per_block for p in pairs) > 200
    assert sum(p.sender.tokens_per_block < p.receiver.tokens_per_block for p in pairs) > 200
    assert sum(p.sender.layout.order != p.receiver.layout.order for p in pairs) > 200
    assert sum(not p.sender.layout.is_plain for p in pairs) > 100
    assert sum(len(set(p.sender.windows)) > 1 for p in pairs) > 200
    assert sum(p.sender.attention == "latent" for p in pairs) > 200
    assert sum(not p.tokens for p in pairs) > 20
    assert sum(0 < p.most_layers < p.sender.num_layers for p in pairs) > 200


def test_a_wrong_plan_shows():
    """Negative control: drop, repeat and shift one chunk of a right plan."""
    pair = next(
        pair
        for pair in map(random_pair, range(100))
        if not pair.receiver_group and len(chunks_for(pair, Rank(0))) > 3 and chunks_for(pair, Rank(0))[0].tokens.start
    )
    right = chunks_for(pair, Rank(0))
    assert travels_once(pair, Rank(0), right)
    assert not travels_once(pair, Rank(0), right[1:])
    assert not travels_once(pair, Rank(0), [*right, right[0]])
    assert not travels_once(pair, Rank(0), [moved_by_one(right[0]), *right[1:]])


def chunks_for(pair, rank):
    """All chunks one receiving rank gets, after checking that each sender holds what it is to send."""
    chunks: list[Chunk] = []
    length = widened(pair.tokens, pair.sender).stop
    plans = receive_plans(
        pair.receiver, rank, pair.sender, pair.tokens, spread=rank % 3, group=pair.sender_group, num_tokens=length
    )
    for plan in plans:
        share = pair.sender.share_of(plan.sender)
        assert plan.sender in pair.sender.parallel.ranks_of(pair.sender_group)
        assert all(share.layers.covers(piece.layers) and share.heads.covers(piece.heads) for piece in plan.pieces)
        chunks += chunks_of(plan.pieces, plan.tokens, pair.sender, pair.max_bytes, pair.most_layers)
    return chunks


def travels_once(pair, rank, chunks):
    tokens = widened(pair.tokens, pair.sender)
    counted = moves(pair.sender, chunks, tokens.stop + 1)
    return bool((counted == wanted(pair.receiver, rank, tokens, tokens.stop)).all())


def moved_by_one(chunk):
    tokens = Span(chunk.tokens.start - 1, chunk.tokens.stop - 1)
    return Chunk(chunk.seq, Piece(chunk.piece.layers, chunk.piece.heads), tokens, chunk.num_bytes)
