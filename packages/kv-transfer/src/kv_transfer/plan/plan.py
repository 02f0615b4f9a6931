"""What one receiving rank takes from each sending rank, and in which bounded portions.

In:  both instances' CacheStates, the receiving rank, the span of tokens wanted, the group the peer keeps them in.
Out: SessionPlans, one per sending rank that has something for us; and the Chunks of a plan, in order.
Law: every (layer, head, token) wanted lies in exactly one piece of one plan and in exactly one chunk of it. Sender and
receiver compute equal chunks from equal values. Transfer spec 3, 4, 5.12, 6.10; defects A3, A6, A7, A15, B2, B3, B9,
I1 to I4.

A piece is a box: the half-open intervals of layers, heads and tokens that both ranks hold. Tokens are cut where either
side deals them to context ranks, and per layer at the beginning of its window.

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
from kv_transfer.plan.cache_state import MAX_HEADS, MAX_LAYERS, CacheState, Share
from kv_transfer.plan.targets import holding_ranks, target_ranks

MAX_TOKENS: Final = 2**31
"""More tokens than any request has; bounds what a peer can make us compute."""

ONE: Final = Span(0, 1)


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A box of global layers, global KV heads and tokens; all tokens of its plan if it names none."""

    layers: Span
    heads: Span
    tokens: Span | None = None

    def __post_init__(self) -> None:
        _check_span("layers", self.layers, MAX_LAYERS)
        _check_span("heads", self.heads, MAX_HEADS)
        if self.tokens is not None:
            _check_span("tokens", self.tokens, MAX_TOKENS)


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
    ours: CacheState,
    rank: Rank,
    peer: CacheState,
    tokens: Span,
    spread: int = 0,
    *,
    group: int = 0,
    num_tokens: int | None = None,
) -> tuple[SessionPlan, ...]:
    """What our `rank` takes from each of the peer's ranks, by ascending sender.

    `group` is the peer's that holds the request, `num_tokens` the length of the sequence that context ranks share
    (`tokens.stop` if none is given). Layers with a window take what the token at `tokens.stop` may see, by whole blocks
    of ours. None at all when nothing of the tokens or layers is ours: an empty transfer is a legal, immediate success.
    The two states must be compatible (`compatibility.reasons` is empty).
    """
    length = tokens.stop if num_tokens is None else num_tokens
    pieces: dict[Rank, list[Piece]] = {}
    for sender, piece in _pieces(ours, ours.share_of(rank), peer, tokens, spread, group, length) if tokens else ():
        pieces.setdefault(sender, []).append(piece)
    return tuple(_session_plan(sender, rank, tuple(pieces[sender]), peer, tokens) for sender in sorted(pieces))


def send_plans(
    ours: CacheState,
    rank: Rank,
    peer: CacheState,
    tokens: Span,
    spread: int = 0,
    *,
    group: int = 0,
    peer_group: int = 0,
    num_tokens: int | None = None,
) -> tuple[SessionPlan, ...]:
    """What the ranks of the peer's group will take from our `rank`: their own plans, by ascending receiver."""
    return tuple(
        plan
        for receiver in peer.parallel.ranks_of(peer_group)
        for plan in receive_plans(peer, receiver, ours, tokens, spread, group=group, num_tokens=num_tokens)
        if plan.sender == rank
    )


def counterparts(
    ours: CacheState, rank: Rank, peer: CacheState, num_tokens: int, *, group: int = 0
) -> tuple[Rank, ...]:
    """Every rank of the peer's group that holds a layer, a head and a token of a sequence that `rank` holds too.

    Copies are included: who of them gives is for `receive_plans` to say. By context rank, tensor rank, stage.
    """
    share = ours.share_of(rank)
    mine = ours.token_share(share.context_rank, num_tokens).runs
    meets = [
        any(one & other for one in mine for other in peer.token_share(context_rank, num_tokens).runs)
        for context_rank in range(peer.parallel.num_context_ranks)
    ]
    holding = holding_ranks(share, peer.parallel, group)
    return tuple(one for one in holding if meets[peer.share_of(one).context_rank])


def chunks_of(
    pieces: Sequence[Piece], tokens: Span, state: CacheState, max_bytes: int, most_layers: int = 0
) -> tuple[Chunk, ...]:
    """Cuts the pieces into chunks of at most `max_bytes`; `state` is the sender's.

    Chunks are in order of their last tokens, over all pieces, then of their layers.
    Tokens are cut first, at block boundaries of the sender, so that a chunk touches few blocks on either side. Layers
    are cut only when one block of all layers is too big, and blocks only when one block of one layer is. Raises
    CallerError when not even the smallest movable unit of one layer fits. With `most_layers` a chunk that holds more of
    them is cut into some that do not, of the same tokens.
    """
    cuts = [
        cut for piece in pieces for cut in _cuts(piece, _moved(piece, tokens, state), state, max_bytes, most_layers)
    ]
    # Why sorted: a prompt is computed from its first token on, a step of it from the first layer on.
    cuts.sort(key=lambda cut: (cut[1].stop, cut[0].layers.start))
    return tuple(Chunk(seq, *cut) for seq, cut in enumerate(cuts))


def needed(chunk: Chunk, tokens: Span) -> Span:
    """Of the chunk's tokens those that are among `tokens`, the ones asked for: what `widened` adds has no content."""
    return chunk.tokens & tokens


def widened(tokens: Span, state: CacheState) -> Span:
    """The tokens that must move so that `tokens` do: themselves, or whole blocks where tiles are opaque."""
    unit = state.tokens_per_unit
    return Span(tokens.start // unit * unit, ceil_div(tokens.stop, unit) * unit) if tokens else tokens


def num_bytes_of(layers: Span, heads: Span, tokens: Span, state: CacheState) -> int:
    """Bytes on the wire of some layers and heads, for these tokens (see `widened`); `state` is the sender's."""
    return len(layers) * len(heads) * len(tokens) * state.num_planes * state.bytes_per_token_head


def seen_by_next(tokens: Span, window: int, *, chunked: bool = False) -> Span:
    """The part of `tokens` that the token after them sees through a window that counts itself; 0 sees all."""
    if not window:
        return tokens
    first = tokens.stop // window * window if chunked else tokens.stop - window + 1
    return Span(min(max(tokens.start, first), tokens.stop), tokens.stop)


def kept_for_next(tokens: Span, window: int, state: CacheState) -> Span:
    """What the token after them sees, by whole blocks of our scheduler: they become prefixes that others share."""
    first, block = seen_by_next(tokens, window, chunked=state.chunked).start, state.tokens_per_allocation
    return Span(max(tokens.start, first // block * block), tokens.stop)


def _pieces(
    ours: CacheState, share: Share, peer: CacheState, tokens: Span, spread: int, group: int, length: int
) -> Iterator[tuple[Rank, Piece]]:
    """(sender, box) of everything the share takes: the one intersection over layers, heads and tokens."""
    mine = ours.token_share(share.context_rank, length).runs
    for context_rank in range(peer.parallel.num_context_ranks):
        theirs = peer.token_share(context_rank, length).runs
        runs = [run for one in mine for other in theirs if (run := one & other & tokens)]
        if not runs:
            continue
        for target in target_ranks(share, peer.parallel, spread, group=group, context_rank=context_rank):
            for layers, window in _layers_by_window(target.layers, ours):
                seen = kept_for_next(tokens, window, ours)
                for part in (part for run in runs if (part := run & seen)):
                    yield target.rank, Piece(layers, target.heads, None if part == tokens else part)


def _layers_by_window(layers: Span, state: CacheState) -> Iterator[tuple[Span, int]]:
    """Neighbouring layers with one window."""
    for window, group in groupby(layers, key=state.window_of):
        found = list(group)
        yield Span(found[0], found[-1] + 1), window


def _session_plan(
    sender: Rank, receiver: Rank, pieces: tuple[Piece, ...], peer: CacheState, tokens: Span
) -> SessionPlan:
    num_bytes = sum(num_bytes_of(piece.layers, piece.heads, _moved(piece, tokens, peer), peer) for piece in pieces)
    return SessionPlan(sender, receiver, pieces, tokens, num_bytes)


def _moved(piece: Piece, tokens: Span, state: CacheState) -> Span:
    return widened(tokens if piece.tokens is None else piece.tokens, state)


def _cuts(
    piece: Piece, tokens: Span, state: CacheState, max_bytes: int, most_layers: int
) -> Iterator[tuple[Piece, Span, int]]:
    """(box, tokens, bytes) of each chunk of one piece: tokens outermost, so that early tokens arrive first."""
    num_layers, num_tokens = _steps(piece, state, max_bytes)
    num_layers = min(num_layers, most_layers or num_layers)
    boxes = [
        (Piece(layers, piece.heads), num_bytes_of(layers, piece.heads, ONE, state))
        for layers in _steps_over(piece.layers, num_layers, 1)
    ]
    for part in _steps_over(tokens, num_tokens, state.tokens_per_block):
        for box, token_bytes in boxes:
            yield box, part, len(part) * token_bytes


def _steps(piece: Piece, state: CacheState, max_bytes: int) -> tuple[int, int]:
    """How many layers and how many tokens one chunk may hold."""
    num_layers, block = len(piece.layers), state.tokens_per_block
    token_bytes = num_bytes_of(ONE, piece.heads, ONE, state)
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
    grid = min(grid, step)
    for start in range(span.start // grid * grid, span.stop, step):
        yield Span(max(start, span.start), min(start + step, span.stop))


def _check_span(what: str, span: Span, stop: int) -> None:
    if not 0 <= span.start < span.stop <= stop:
        raise CallerError(f"{what} are empty or out of bounds: got={span}, allowed=[0, {stop})")
