"""What one receiving rank takes from each sending rank, and in which bounded portions.

In:  both instances' CacheStates, the receiving rank, the span of tokens wanted.
Out: SessionPlans, one per sending rank that has something for us; and the Chunks of a plan, in order.
Law: every (layer, head, token) wanted lies in exactly one piece of one plan and in exactly one chunk of it. Sender and
receiver compute equal chunks from equal values. Transfer spec 3, 4, 6.10; defects A3, A7, A15, B2, B9.

A chunk travels as one dense array in the sender's order: [layer][plane][token][head][element] if that is token major,
[layer][plane][head][token][element] if head major. Where tiles are opaque the token axis counts blocks and the
element axis holds a whole tile; chunks then begin and end on block boundaries, even if the wanted tokens do not.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

import msgspec

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import Span, ceil_div
from kv_transfer.plan.cache_state import MAX_HEADS, MAX_LAYERS, CacheState
from kv_transfer.plan.targets import Target, target_ranks

MAX_TOKENS: Final = 2**31
"""More tokens than any request has; bounds what a peer can make us compute."""


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rectangle of global layers and global KV heads; holds for every token of its plan."""

    layers: Span
    heads: Span

    def __post_init__(self) -> None:
        _check_span("layers", self.layers, MAX_LAYERS)
        _check_span("heads", self.heads, MAX_HEADS)


class SessionPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that one sending rank gives to one receiving rank for one request. `num_bytes` counts the wire."""

    sender: Rank
    receiver: Rank
    pieces: tuple[Piece, ...]
    tokens: Span
    num_bytes: int

    def __post_init__(self) -> None:
        _check_span("tokens", self.tokens, MAX_TOKENS)


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One portion of a plan: some layers of one piece, for some of its tokens. `seq` counts from 0 within the plan."""

    seq: int
    piece: Piece
    tokens: Span
    num_bytes: int

    def __post_init__(self) -> None:
        _check_span("tokens", self.tokens, MAX_TOKENS)


def receive_plans(
    ours: CacheState, rank: Rank, peer: CacheState, tokens: Span, spread: int = 0
) -> tuple[SessionPlan, ...]:
    """What our `rank` takes from each of the peer's ranks, by ascending sender.

    None at all when the token span or our share of the layers is empty: an empty transfer is a legal, immediate
    success. The two states must be compatible (`compatibility.reasons` is empty).
    """
    if not tokens:
        return ()
    targets = sorted(target_ranks(ours.share_of(rank), peer.parallel, spread), key=lambda target: target.rank)
    return tuple(
        _session_plan(sender, rank, list(group), peer, tokens)
        for sender, group in groupby(targets, key=lambda target: target.rank)
    )


def send_plans(
    ours: CacheState, rank: Rank, peer: CacheState, tokens: Span, spread: int = 0
) -> tuple[SessionPlan, ...]:
    """What each of the peer's ranks will take from our `rank`: the receivers' own plans, by ascending receiver."""
    return tuple(
        plan
        for receiver in peer.parallel.ranks
        for plan in receive_plans(peer, receiver, ours, tokens, spread)
        if plan.sender == rank
    )


def chunks_of(pieces: Sequence[Piece], tokens: Span, state: CacheState, max_bytes: int) -> tuple[Chunk, ...]:
    """Cuts the pieces into chunks of at most `max_bytes`; `state` is the sender's.

    Tokens are cut first, at block boundaries of the sender, so that a chunk touches few blocks on either side. Layers
    are cut only when one block of all layers is too big, and blocks only when one block of one layer is. Raises
    CallerError when not even the smallest movable unit of one layer fits.
    """
    parts = (
        (Piece(layers, piece.heads), part, num_bytes_of(layers, piece.heads, part, state))
        for piece in pieces
        for layers, part in _cuts(piece, widened(tokens, state), state, max_bytes)
    )
    return tuple(Chunk(seq, *part) for seq, part in enumerate(parts))


def widened(tokens: Span, state: CacheState) -> Span:
    """The tokens that must move so that `tokens` do: themselves, or whole blocks where tiles are opaque."""
    unit = state.tokens_per_unit
    return Span(tokens.start // unit * unit, ceil_div(tokens.stop, unit) * unit) if tokens else tokens


def num_bytes_of(layers: Span, heads: Span, tokens: Span, state: CacheState) -> int:
    """Bytes on the wire of some layers and heads, for these tokens (see `widened`); `state` is the sender's."""
    return len(layers) * len(heads) * len(tokens) * state.num_planes * state.bytes_per_token_head


def _session_plan(sender: Rank, receiver: Rank, targets: list[Target], peer: CacheState, tokens: Span) -> SessionPlan:
    pieces = tuple(Piece(target.layers, target.heads) for target in targets)
    moved = widened(tokens, peer)
    num_bytes = sum(num_bytes_of(piece.layers, piece.heads, moved, peer) for piece in pieces)
    return SessionPlan(sender, receiver, pieces, tokens, num_bytes)


def _cuts(piece: Piece, tokens: Span, state: CacheState, max_bytes: int) -> Iterator[tuple[Span, Span]]:
    """(layers, tokens) of each chunk of one piece: tokens outermost, so that early tokens arrive first."""
    num_layers, num_tokens = _steps(piece, state, max_bytes)
    for part in _steps_over(tokens, num_tokens, state.tokens_per_block):
        for layers in _steps_over(piece.layers, num_layers, 1):
            yield layers, part


def _steps(piece: Piece, state: CacheState, max_bytes: int) -> tuple[int, int]:
    """How many layers and how many tokens one chunk may hold."""
    num_layers, block = len(piece.layers), state.tokens_per_block
    token_bytes = num_bytes_of(Span(0, 1), piece.heads, Span(0, 1), state)
    if (blocks := max_bytes // (block * token_bytes * num_layers)) > 0:
        return num_layers, blocks * block
    if (layers := max_bytes // (block * token_bytes)) > 0:
        return layers, block
    unit_bytes = token_bytes * state.tokens_per_unit
    units = max_bytes // unit_bytes
    if units < 1:
        raise CallerError(f"a chunk cannot hold one unit: unit={unit_bytes} bytes, max_bytes={max_bytes}")
    return 1, units * state.tokens_per_unit


def _steps_over(span: Span, step: int, grid: int) -> Iterator[Span]:
    """Cuts `span` every `step`, counted from the grid line at or before its start."""
    # A step below the grid is its own grid.
    origin = span.start // min(grid, step) * min(grid, step)
    for start in range(origin, span.stop, step):
        yield Span(max(start, span.start), min(start + step, span.stop))


def _check_span(what: str, span: Span, stop: int) -> None:
    if span.start < 0 or span.stop > stop or not span:
        raise CallerError(f"{what} are empty or out of bounds: got={span}, allowed=[0, {stop})")
