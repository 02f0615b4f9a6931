"""Why a session cannot be served, now or ever.

In:  what a peer asks for; our share of the model; the offer that it would be served from, if there is one.
Out: the End with which it is turned away, or the words for it; nothing, if it can be served or may wait.
Law: what a peer says of sizes is computed with only after it is bounded by our own.
"""

from kv_core.spans import Span, ceil_div
from kv_transfer.offers import HeldOffer
from kv_transfer.plan.cache_state import CacheState, Share
from kv_transfer.plan.compatibility import is_converted
from kv_transfer.plan.plan import Piece, num_bytes_of, widened
from kv_transfer.protocol.messages import MAX_CHUNKS, Ask, RefuseCode, clipped
from kv_transfer.room import Room
from kv_transfer.send_session import End, SendSession


def not_admitted(session: SendSession, room: Room, *, is_closing: bool, is_full: bool) -> End | None:
    """Why we serve nobody, or nobody like this one, whatever is asked for."""
    ask, identity = session.ask, room.identity
    if ask.incarnation != identity.incarnation:
        why = f"another run of the instance is meant: ours={identity.incarnation}, theirs={ask.incarnation}"
        return End(RefuseCode.WRONG_INCARNATION, why)
    if is_closing:
        return End(RefuseCode.CLOSING, f"{identity} is closing")
    if trouble := room.health.look():
        return End(RefuseCode.INTERNAL, clipped(f"{identity} sends nothing new: {trouble}"))
    if is_full:
        return End(RefuseCode.BUSY, f"too many sessions: most={room.config.max_sessions}")
    if ask.direct and room.direct is None and room.shared is None:
        return End(RefuseCode.UNFIT, "our caches can neither be mapped nor read: ours=staged, theirs=direct")
    if ask.direct and is_converted(identity.state, session.peer.state):
        types = f"ours={identity.state.dtype}, theirs={session.peer.state.dtype}"
        return End(RefuseCode.UNFIT, f"elements that are converted are not read where they lie: {types}")
    return None


def unserved(session: SendSession, room: Room, held: HeldOffer | None) -> str:
    """Why this session cannot be served by this rank, or not from this offer; empty if it can."""
    identity = room.identity
    share = identity.state.share_of(identity.card.rank)
    return misfit(session.ask, identity.state, share, identity.card.max_chunk_bytes, held)


def misfit(ask: Ask, state: CacheState, share: Share, max_chunk_bytes: int, held: HeldOffer | None) -> str:
    """Why this rank can never serve this ask, or not from this offer; empty if it can."""
    for piece in ask.pieces:
        if not (share.layers.covers(piece.layers) and share.heads.covers(piece.heads)):
            ours = f"layers {share.layers} heads {share.heads}"
            return f"pieces are not ours: ours={ours}, theirs=layers {piece.layers} heads {piece.heads}"
    if ask.chunk_bytes > max_chunk_bytes:
        return f"chunks are too large: ours={max_chunk_bytes}, theirs={ask.chunk_bytes}"
    moved = [(piece, widened(_tokens(piece, ask), state)) for piece in ask.pieces]
    num_bytes = sum(num_bytes_of(piece.layers, piece.heads, tokens, state) for piece, tokens in moved)
    most_layers = max(len(piece.layers) for piece in ask.pieces)
    num_cuts = ceil_div(most_layers, ask.layers_per_chunk or most_layers)
    # A chunk is at least half full, or the last of its row; then it is cut by layers.
    if num_cuts * max(len(ask.pieces), 2 * num_bytes // ask.chunk_bytes) > MAX_CHUNKS:
        layers = f"layers a chunk={ask.layers_per_chunk or most_layers} of {most_layers}"
        return f"too many chunks: bytes={num_bytes}, chunk={ask.chunk_bytes}, {layers}, most={MAX_CHUNKS}"
    # Why only now: what a peer says of the length of a prompt is not computed with before the offer bounds it.
    return "" if held is None else _unoffered(ask, state, share, held.offer.num_tokens)


def _unoffered(ask: Ask, state: CacheState, share: Share, offered: int) -> str:
    """Why these tokens are not to be had from an offer of so many; empty if they are."""
    if ask.tokens.stop > offered:
        return f"tokens are not offered: wanted={ask.tokens}, offered=[0, {offered})"
    if state.parallel.num_context_ranks > 1 and ask.num_tokens != offered:
        return f"context ranks share a sequence of another length: ours={offered}, theirs={ask.num_tokens}"
    ours = state.token_share(share.context_rank, offered)
    for piece in ask.pieces:
        if not ask.tokens.covers(_tokens(piece, ask)):
            return f"pieces reach beyond the tokens asked for: asked={ask.tokens}, piece={piece.tokens}"
        try:
            ours.local(_tokens(piece, ask))
        except ValueError as error:
            return f"pieces are not ours: {error}"
    volume = sum(_volume(piece.layers, piece.heads, len(_tokens(piece, ask))) for piece in ask.pieces)
    held = _volume(share.layers, share.heads, sum(len(run & ask.tokens) for run in ours.runs))
    if volume > held:
        return f"pieces overlap: elements of a plane asked for={volume}, ours={held}"
    return ""


def _tokens(piece: Piece, ask: Ask) -> Span:
    return ask.tokens if piece.tokens is None else piece.tokens


def _volume(layers: Span, heads: Span, num_tokens: int) -> int:
    return len(layers) * len(heads) * num_tokens
