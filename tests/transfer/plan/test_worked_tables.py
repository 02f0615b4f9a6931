"""The worked examples of transfer spec 3.4, 4.5 and 4.6 that apply to full attention without context parallelism.

Attention data parallelism is left out: there each group is an instance of its own here. The spec lists all peers that
overlap, copies included; we name one copy of each. Over all spreads the two sets must be equal.
"""

import pytest

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.layouts import make_state
from kv_transfer.plan.cache_state import ParallelLayout
from kv_transfer.plan.plan import receive_plans
from kv_transfer.plan.targets import target_ranks

# (case, heads, own TP, own layers per stage, own ranks, peer TP, peer layers per stage, peers, layers of each)
TARGETS = [
    ("1 identical", 4, 2, [2, 2], [0], 2, [2, 2], [0], [2]),
    ("1 identical", 4, 2, [2, 2], [3], 2, [2, 2], [3], [2]),
    ("2 peer TP wider", 4, 1, [4], [0], 4, [4], [0, 1, 2, 3], [4]),
    ("3 peer TP narrower", 4, 4, [4], [0, 1], 2, [4], [0], [4]),
    ("3 peer TP narrower", 4, 4, [4], [2, 3], 2, [4], [1], [4]),
    ("4 PP 2 to 1", 4, 1, [2, 2], [0, 1], 1, [4], [0], [2]),
    ("5 PP 1 to 2", 4, 1, [4], [0], 1, [2, 2], [0, 1], [2, 2]),
    ("6 TP and PP grow", 8, 2, [4], [0], 4, [2, 2], [0, 4, 1, 5], [2, 2]),
    ("6 TP and PP grow", 8, 2, [4], [1], 4, [2, 2], [2, 6, 3, 7], [2, 2]),
    ("7 uneven stages", 4, 1, [4, 3], [0], 1, [3, 2, 2], [0, 1], [3, 1]),
    ("7 uneven stages", 4, 1, [4, 3], [1], 1, [3, 2, 2], [1, 2], [1, 2]),
    ("8 uneven, straddling", 4, 2, [5, 3, 2], [0], 1, [4, 6], [0, 1], [4, 1]),
    ("8 uneven, straddling", 4, 2, [5, 3, 2], [2], 1, [4, 6], [1], [3]),
    ("8 uneven, straddling", 4, 2, [5, 3, 2], [4], 1, [4, 6], [1], [2]),
    ("9 self holds copies", 2, 4, [4], [0, 1], 2, [4], [0], [4]),
    ("9 self holds copies", 2, 4, [4], [2, 3], 2, [4], [1], [4]),
    ("10 peer holds copies", 2, 2, [4], [0], 4, [4], [0, 1], [4]),
    ("11 both hold copies", 2, 4, [4], [3], 8, [4], [4, 5, 6, 7], [4]),  # the spec names two of the four copies: 6 7
    ("12 copies and wider", 4, 2, [4], [1], 8, [2, 2], [4, 12, 5, 13, 6, 14, 7, 15], [2, 2]),
    ("21 empty own stage", 4, 1, [2, 0, 2], [1], 1, [4], [], []),
]


@pytest.mark.parametrize("row", TARGETS, ids=lambda row: row[0])
def test_the_peers_of_the_table(row):
    _, heads, tp, stages, ranks, peer_tp, peer_stages, peers, layers = row
    ours, peer = ParallelLayout.even(tp, stages, heads), ParallelLayout.even(peer_tp, peer_stages, heads)
    for rank in ranks:
        chosen = [target_ranks(ours.share_of(Rank(rank)), peer, spread) for spread in range(8)]
        assert {target.rank for targets in chosen for target in targets} == set(peers)
        assert all(_layers_per_stage(targets) == layers for targets in chosen)


def _layers_per_stage(targets):
    return [len(layers) for layers in sorted({target.layers for target in targets})]


def state(tp, stages, heads):
    parallel = ParallelLayout.even(tp, stages, heads)
    return make_state(num_layers=sum(stages), num_kv_heads=heads, parallel=parallel)


# (sender TP, receiver TP, heads, groups of senders that hold the same heads): one of each group sends, spec 4.5.
# Which one rotates with the receiver's rank and the spread, where the spec always takes the lowest (4.8, defect A13).
SENDERS = [
    (4, 2, 2, [{0, 1}, {2, 3}]),
    (4, 1, 2, [{0, 1}, {2, 3}]),
    (8, 2, 4, [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
    (4, 4, 4, [{0}, {1}, {2}, {3}]),
    (4, 1, 1, [{0, 1, 2, 3}]),
]


@pytest.mark.parametrize(("tp", "peer_tp", "heads", "groups"), SENDERS)
@pytest.mark.parametrize("spread", range(4))
def test_one_sender_of_each_group_of_copies(tp, peer_tp, heads, groups, spread):
    sender, receiver = state(tp, [4], heads), state(peer_tp, [4], heads)
    sending = {
        plan.sender
        for rank in receiver.parallel.ranks
        for plan in receive_plans(receiver, rank, sender, Span(0, 9), spread)
    }
    assert [len(sending & group) for group in groups] == [1] * len(groups)


# (receiver TP, its rank, sender TP, sender stages, heads, spread, sending ranks): transfer spec 4.6.
PICKS = [
    (1, 0, 4, [4], 4, 0, [0, 1, 2, 3]),
    (1, 0, 4, [4], 2, 0, [0, 2]),
    (1, 0, 4, [2, 2], 2, 0, [0, 2, 4, 6]),
    (1, 0, 4, [2, 2], 2, 1, [1, 3, 5, 7]),
    (1, 0, 4, [4], 1, 3, [3]),
    (2, 1, 8, [4], 4, 1, [4, 6]),
    (8, 5, 2, [4], 4, 0, [1]),
]


@pytest.mark.parametrize(("tp", "rank", "peer_tp", "stages", "heads", "spread", "senders"), PICKS)
def test_the_picks_of_the_table(tp, rank, peer_tp, stages, heads, spread, senders):
    plans = receive_plans(state(tp, [4], heads), Rank(rank), state(peer_tp, stages, heads), Span(0, 9), spread)
    assert [plan.sender for plan in plans] == senders
