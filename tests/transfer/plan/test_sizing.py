"""Staging memory for requests: never less than what a plan puts on the wire for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import Span
from kv_transfer.plan.cache_state import BlockLayout, CacheState, ParallelLayout
from kv_transfer.plan.plan import receive_plans
from kv_transfer.plan.sizing import staging_bytes, token_bytes


def state(tp, layers_per_stage, heads, windows=()):
    return CacheState(
        fingerprint="model",
        dtype="float16",
        head_size=4,
        num_layers=sum(layers_per_stage),
        num_kv_heads=heads,
        tokens_per_block=4,
        layout=BlockLayout("token_major"),
        windows=windows,
        parallel=ParallelLayout.even(tp, layers_per_stage, heads),
    )


def test_a_token_takes_what_the_rank_holds_of_it_by_window():
    split = state(2, [2, 3], 4, windows=(0, 8, 8, 0, 8))
    assert token_bytes(split, Rank(0)) == {0: 2 * 2 * 4 * 2, 8: 2 * 2 * 4 * 2}
    assert token_bytes(split, Rank(2)) == {8: 2 * 2 * 2 * 4 * 2, 0: 2 * 2 * 4 * 2}
    assert token_bytes(state(1, [0, 2], 1), Rank(0)) == {}


def test_a_window_counts_its_own_tokens_and_one_block_more():
    assert staging_bytes({80: 4096}, 80, 8) == 88 * 4096
    assert staging_bytes({100: 512}, 1024, 8) == (104 + 8) * 512
    assert staging_bytes({0: 2, 8: 3}, 30, 4, num_requests=3) == 3 * (34 * 2 + 12 * 3)


@given(
    tp=st.integers(1, 3),
    peer_tp=st.integers(1, 3),
    first=st.integers(0, 40),
    length=st.integers(1, 40),
    windows=st.tuples(*[st.integers(0, 12)] * 3),
)
def test_one_request_always_fits(tp, peer_tp, first, length, windows):
    ours, peer = state(tp, [1, 2], 6, windows), state(peer_tp, [3], 6, windows)
    for rank in ours.parallel.ranks:
        plans = receive_plans(ours, rank, peer, Span(first, first + length))
        assert sum(plan.num_bytes for plan in plans) <= staging_bytes(token_bytes(ours, rank), length, 4)


@pytest.mark.parametrize("counts", [(0, 4, 1), (1, 0, 1), (1, 4, 0)])
def test_nothing_is_staged_for_nothing(counts):
    with pytest.raises(CallerError, match="nothing is staged"):
        staging_bytes({0: 1}, *counts)
