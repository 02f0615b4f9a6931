"""The worked sizes of transfer spec 7.2: what one rank sends another, in elements of one byte.

The spec lists the slots of a buffer; here each pair of ranks has a plan of its own, and its bytes are the slot's.
"""

import pytest

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.layouts import make_state
from kv_transfer.plan.cache_state import ParallelLayout
from kv_transfer.plan.plan import receive_plans

TEN_BLOCKS, SEVEN_BLOCKS = Span(0, 640), Span(0, 448)


def state(tp, stages=(4,), heads=4):
    parallel = ParallelLayout.even(tp, stages, heads)
    return make_state(
        dtype="uint8", head_size=128, tokens_per_block=64, num_layers=sum(stages), num_kv_heads=heads, parallel=parallel
    )


def latent(stages, **cut):
    parallel = ParallelLayout.even(1, stages, 1, **cut)
    return make_state(
        dtype="uint8",
        attention="latent",
        num_planes=1,
        head_size=576,
        tokens_per_block=64,
        num_layers=5,
        num_kv_heads=1,
        parallel=parallel,
    )


def sizes(sender, receiver, tokens=TEN_BLOCKS):
    """{(sender, receiver): bytes}."""
    plans = (plan for rank in receiver.parallel.ranks for plan in receive_plans(receiver, rank, sender, tokens))
    return {(plan.sender, plan.receiver): plan.num_bytes for plan in plans}


def received_by(rank, sender, receiver):
    return [plan.num_bytes for plan in receive_plans(receiver, Rank(rank), sender, TEN_BLOCKS)]


def test_one_rank_to_two():
    assert sizes(state(1), state(2)) == {(0, 0): 1_310_720, (0, 1): 1_310_720}


def test_four_ranks_to_two():
    assert sizes(state(4), state(2)) == {(0, 0): 655_360, (1, 0): 655_360, (2, 1): 655_360, (3, 1): 655_360}


def test_copies_at_the_sender():
    """Ranks 0 and 1 hold one head, ranks 2 and 3 the other: one of each gives."""
    assert received_by(1, state(4, heads=2), state(2, heads=2)) == [655_360]


def test_copies_at_the_receiver():
    """The spec has two slots for four connections; here four plans of the same size."""
    assert sizes(state(1, heads=2), state(4, heads=2)) == {(0, rank): 655_360 for rank in range(4)}


def test_uneven_stages():
    found = sizes(state(1, (5, 3, 2)), state(1, (4, 6)))
    assert found == {(0, 0): 2_621_440, (0, 1): 655_360, (1, 1): 1_966_080, (2, 1): 1_310_720}


@pytest.mark.parametrize("cut", ["contiguous", "round_robin"])
def test_latent_stages_and_context_ranks(cut):
    """7 blocks over 2 context ranks, 5 layers over 3 and 2; ranks count the context rank first."""
    found = sizes(latent((5,)), latent((3, 2), cp=2, context_cut=cut), SEVEN_BLOCKS)
    assert found == {(0, 0): 442_368, (0, 2): 294_912, (0, 1): 331_776, (0, 3): 221_184}
