"""Which peer ranks hold a part of what one of our ranks holds.

In:  our share of the model and the peer's ParallelLayout.
Out: the peer ranks to talk to, each with the layers and heads to exchange; and all that hold a part, copies included.
Law: every (layer, head) of our share lies in exactly one Target. Transfer spec 3, 4.8; defects A1, A5, A7, A13.

Tokens are cut afterwards (`plan`): every context rank of the peer has the same layers and heads to give.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import Span
from kv_transfer.plan.cache_state import ParallelLayout, Share


@dataclass(frozen=True, slots=True)
class Target:
    """One rectangle of (global layer, global head) to exchange with one peer rank."""

    rank: Rank
    layers: Span
    heads: Span


def target_ranks(
    ours: Share, peer: ParallelLayout, spread: int = 0, *, group: int = 0, context_rank: int = 0
) -> tuple[Target, ...]:
    """One source for each part of `ours`, ordered by layers, then heads.

    Only ranks of the peer's `group` that have this `context_rank` are looked at. Where the peer holds a head several
    times, the copy is chosen by our rank plus `spread`, any number both sides agree on for this request. Raises
    CallerError if the peer lacks a layer or a head of ours.
    """
    _check_covered("layers", ours.layers, Span(0, peer.num_layers))
    _check_covered("heads", ours.heads, Span(0, peer.num_kv_heads))
    columns = tuple(_columns(ours, peer, spread, group))
    return tuple(
        Target(peer.rank_at(stage, tensor_rank, context_rank), common, heads)
        for stage, theirs in enumerate(peer.layers)
        if (common := ours.layers & theirs)
        for tensor_rank, heads in columns
    )


def holding_ranks(ours: Share, peer: ParallelLayout, group: int = 0) -> tuple[Rank, ...]:
    """Every rank of the peer's group that holds a layer and a head of ours; by context rank, tensor rank, stage."""
    return tuple(
        peer.rank_at(stage, tensor_rank, context_rank)
        for context_rank in range(peer.num_context_ranks)
        for tensor_rank in peer.tensor_ranks_of(group)
        for stage, layers in enumerate(peer.layers)
        if ours.layers & layers and ours.heads & peer.heads[tensor_rank]
    )


def _columns(ours: Share, peer: ParallelLayout, spread: int, group: int) -> Iterator[tuple[int, Span]]:
    """Our heads cut into runs, each with the peer's tensor rank that serves it.

    ours          [0 . . . . . 6)
    peer  0       [0 . . 3)             cuts: 0 2 3 5 6
          1           [2 . . 5)         between two cuts the set of holders is constant
          2                 [5 6)
    """
    theirs = {number: peer.heads[number] for number in peer.tensor_ranks_of(group)}
    chosen = [(_pick(run, ours, theirs, spread), run) for run in _runs(ours.heads, tuple(theirs.values()))]
    for tensor_rank, served in groupby(chosen, key=lambda pair: pair[0]):
        runs = [run for _, run in served]
        yield tensor_rank, Span(runs[0].start, runs[-1].stop)


def _runs(heads: Span, theirs: tuple[Span, ...]) -> Iterator[Span]:
    bounds = {bound for span in theirs for bound in (span.start, span.stop)}
    cuts = sorted({heads.start, heads.stop} | {bound for bound in bounds if heads.start < bound < heads.stop})
    return (Span(start, stop) for start, stop in pairwise(cuts))


def _pick(run: Span, ours: Share, theirs: dict[int, Span], spread: int) -> int:
    # Why by rank: several of our ranks may want one head, and the peer may hold it several times.
    holders = [tensor_rank for tensor_rank, heads in theirs.items() if heads.covers(run)]
    return holders[(ours.rank + spread) % len(holders)]


def _check_covered(what: str, ours: Span, theirs: Span) -> None:
    if not theirs.covers(ours):
        raise CallerError(f"the peer lacks {what} of ours: ours={ours}, theirs={theirs}")
