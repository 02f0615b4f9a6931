"""The worked examples of transfer spec 3.4, 4.5 and 4.6 for latent caches, context ranks and data-parallel attention.

Where the spec names one of several ranks that hold the same (the lowest, or the receiver's own number), any of them may
give here, in turn; so a row tells the sets of copies, and one rank of each must give.
"""

import pytest

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.layouts import make_state
from kv_transfer.plan.cache_state import ParallelLayout
from kv_transfer.plan.plan import receive_plans

TOKENS = Span(0, 64)
"""Four blocks: some for each context rank."""


def state(tp, stages=(4,), heads=4, **cut):
    parallel = ParallelLayout.even(tp, stages, heads, **cut)
    return make_state(num_layers=4, num_kv_heads=heads, parallel=parallel)


def latent(tp, stages=(4,), **cut):
    parallel = ParallelLayout.even(tp, stages, 1, **cut)
    return make_state(num_layers=4, num_kv_heads=1, num_planes=1, attention="latent", parallel=parallel)


def givers(receiver, rank, sender, spread=0, group=0):
    return [plan.sender for plan in receive_plans(receiver, Rank(rank), sender, TOKENS, spread, group=group)]


# (case of 3.4 or row of 4.5 and 4.6, receiver, its ranks, sender, its group, sets of copies of which one each gives)
ROWS = [
    ("3.4 13 self ADP", state(4, groups=4), [2], state(2), 0, [{0}, {1}]),
    ("3.4 14 peer ADP", state(4), [0, 1, 2, 3], state(2, groups=2), 1, [{1}]),
    ("3.4 15 both ADP", state(4, groups=4), [3], state(2, (2, 2), groups=2), 1, [{1}, {3}]),
    ("3.4 16 peer CP 2", latent(1), [0], latent(1, cp=2), 0, [{0}, {1}]),
    ("3.4 17 peer T2 P2 C2", latent(2), [0, 1], latent(2, (2, 2), cp=2), 0, [{0, 2}, {1, 3}, {4, 6}, {5, 7}]),
    ("3.4 18 self CP 2", latent(2, cp=2), [0, 1, 2, 3], latent(2), 0, [{0, 1}]),
    ("3.4 19 peer CP 2, TP wider", latent(2), [0, 1], latent(4, cp=2), 0, [{0, 2, 4, 6}, {1, 3, 5, 7}]),
    ("3.4 20 self C2 P2", latent(1, (2, 2), cp=2), [0, 1, 2, 3], latent(2), 0, [{0, 1}]),
    ("4.5 T4 to ADP4, H 1", state(4, heads=1, groups=4), [0, 1, 2, 3], state(4, heads=1), 0, [{0, 1, 2, 3}]),
    ("4.5 T4 to ADP2, H 2", state(2, heads=2, groups=2), [0, 1], state(4, heads=2), 0, [{0, 1}, {2, 3}]),
    ("4.5 MLA T4 to T2", latent(2), [0, 1], latent(4), 0, [{0, 1, 2, 3}]),
    ("4.5 MLA T4 P2 to T1", latent(1), [0], latent(4, (2, 2)), 0, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
    ("4.5 MLA T4 to ADP2", latent(2, groups=2), [0, 1], latent(4), 0, [{0, 1, 2, 3}]),
    ("4.5 MLA ADP4 dp 1 to T2", latent(2), [0, 1], latent(4, groups=4), 1, [{1}]),
    ("4.6 ADP2 dp 1 of T4 P2", state(2, heads=2, groups=2), [1], state(4, (2, 2), heads=2), 0,
     [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
    ("4.6 MLA ADP2 dp 1 of T4 P2", latent(2, groups=2), [1], latent(4, (2, 2)), 0, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
    ("4.6 MLA T2 C2 of T4", latent(2, cp=2), [3], latent(4), 0, [{0, 1, 2, 3}]),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_one_of_each_set_of_copies_gives(row):
    _, receiver, ranks, sender, group, copies = row
    for rank in ranks:
        used = set()
        for spread in range(8):
            chosen = givers(receiver, rank, sender, spread, group)
            assert sorted(len(found & set(chosen)) for found in copies) == [1] * len(copies)
            assert len(chosen) == len(copies)
            used.update(chosen)
        assert used == set().union(*copies), "each copy gives in its turn"


@pytest.mark.parametrize(
    ("receiver", "sender"),
    [
        (state(4, heads=1, groups=4), state(4, heads=1)),
        (state(2, heads=2, groups=2), state(4, heads=2)),
        (latent(2), latent(4)),
        (latent(2, groups=2), latent(4)),
        (latent(2, groups=2), latent(4, (2, 2))),
    ],
    ids=["T4 to ADP4", "T4 to ADP2", "MLA T4 to T2", "MLA T4 to ADP2", "MLA T4 P2 to ADP2"],
)
def test_receivers_of_equal_things_ask_different_copies(receiver, sender):
    """What the spec reaches by the receiver's data-parallel number, or by its tensor rank for latent caches."""
    asked = [set(givers(receiver, rank, sender)) for rank in receiver.parallel.ranks]
    assert len(set().union(*asked)) == sum(map(len, asked))
