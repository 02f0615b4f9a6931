"""The number of chunks is judged by the bytes that really move; what cannot be asked for fails at once."""

from dataclasses import replace

import msgspec
import pytest

from kv_core.spans import Span
from kv_testing.layouts import make_state
from kv_testing.messages import SAMPLES
from kv_testing.worlds import FAST, make_side, sides
from kv_transfer import admission
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.plan.cache_state import BlockLayout, ParallelLayout
from kv_transfer.plan.plan import Piece, chunks_of
from kv_transfer.protocol.messages import Ask

CHUNK_BYTES = 1 << 20


@pytest.mark.parametrize("tile", ["plain", "packed"])
def test_the_bound_of_chunks_counts_what_moves(monkeypatch, tile):
    """Of an opaque tile the whole moves, even if one token of it is wanted."""
    state = make_state(layout=BlockLayout("head_major", tile))
    share = state.share_of(0)
    pieces = (Piece(share.layers, share.heads),)
    usual = next(sample for sample in SAMPLES if isinstance(sample, Ask))
    ask = msgspec.structs.replace(usual, tokens=Span(15, 17), pieces=pieces, chunk_bytes=CHUNK_BYTES)
    num_bytes = sum(chunk.num_bytes for chunk in chunks_of(pieces, ask.tokens, state, CHUNK_BYTES))
    ask = msgspec.structs.replace(ask, chunk_bytes=num_bytes)
    monkeypatch.setattr(admission, "MAX_CHUNKS", 2)
    assert admission.misfit(ask, state, share, CHUNK_BYTES, None) == ""
    monkeypatch.setattr(admission, "MAX_CHUNKS", 1)
    assert f"too many chunks: bytes={num_bytes}" in admission.misfit(ask, state, share, CHUNK_BYTES, None)


def test_more_pieces_than_a_message_may_have_are_a_reason_at_once():
    short = replace(FAST, max_message_bytes=4096)
    whole, dealt = (
        make_state(dtype="float32", head_size=4, tokens_per_block=1, parallel=ParallelLayout.even(1, [4], 4, **cut))
        for cut in ({}, {"cp": 2, "context_cut": "round_robin"})
    )
    hub = LoopbackHub()
    p, d = (make_side(hub, name, state, short, num_tokens=400) for name, state in (("p", dealt), ("d", whole)))
    with sides(p, d):
        d.order(p, p.offer(num_tokens=400), tokens=Span(0, 400))
        received = d.outcome(timeout_s=10, others=[p])
        assert "Ask is too long" in received.reason
        assert d.count("internal_errors") == 0
        d.check_clean()
