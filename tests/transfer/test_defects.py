"""Known defects of the seed's transfer that no other test shows by itself: see docs/decisions/transfer-defects.md.

Whole hand-overs are in `sessions/test_defects.py`.
"""

import re
from pathlib import Path

import msgspec
import pytest

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.carrier import carry
from kv_testing.layouts import make_state
from kv_testing.messages import SAMPLES
from kv_testing.tagged import FORMS, fill, make_world, misplaced
from kv_transfer.plan.cache_state import ParallelLayout
from kv_transfer.plan.compatibility import reasons
from kv_transfer.plan.plan import chunks_of, receive_plans, seen_by_next
from kv_transfer.plan.targets import target_ranks
from kv_transfer.protocol.codec import encode
from kv_transfer.protocol.messages import Ask, Grant
from kv_transfer.send_session import SendSession

ROOT = Path(__file__).resolve().parents[2]


def even(tp=1, stages=(4,), heads=4, **more):
    return ParallelLayout.even(tp, stages, heads, **more)


def latent(**parallel):
    return make_state(attention="latent", num_planes=1, num_kv_heads=1, parallel=even(heads=1, **parallel))


def moved(sender, receiver, num_tokens):
    """Elements out of place after carrying all tokens, and the bytes it took."""
    forms = [FORMS[state.layout.order][0] for state in (sender, receiver)]
    source, target = make_world(sender, num_tokens, forms[0], 0), make_world(receiver, num_tokens, forms[1], 1)
    fill(source, Span(0, num_tokens))
    num_bytes = carry(source, target, Span(0, num_tokens))
    return misplaced(target, Span(0, num_tokens)), num_bytes


def sample_of(kind):
    """A message of this kind."""
    return next(sample for sample in SAMPLES if isinstance(sample, kind))


@pytest.mark.parametrize(("tp", "peer_tp", "cp", "peer_cp"), [(3, 6, 1, 1), (6, 4, 1, 1), (5, 3, 3, 1), (1, 3, 5, 3)])
def test_a1_no_size_need_be_a_power_of_two(tp, peer_tp, cp, peer_cp):
    sender = make_state(num_kv_heads=6, parallel=even(tp, heads=6, cp=cp))
    receiver = make_state(num_kv_heads=6, parallel=even(peer_tp, heads=6, cp=peer_cp))
    assert moved(sender, receiver, 70)[0] == 0


def test_a5_heads_that_do_not_fit_are_refused_and_not_taken_for_one_copy():
    """3 heads on 4 ranks against 4 on 2: products of 12 and 8, of which neither divides the other."""
    ours = make_state(num_kv_heads=12, parallel=even(4, heads=12))
    peer = make_state(num_kv_heads=8, parallel=even(2, heads=8))
    assert [str(one) for one in reasons(ours, peer)] == ["num_kv_heads differs: ours=12, theirs=8"]
    with pytest.raises(CallerError, match=r"lacks heads of ours: ours=\[9, 12\), theirs=\[0, 8\)"):
        target_ranks(ours.share_of(Rank(3)), peer.parallel)


@pytest.mark.parametrize(("tp", "cp", "peer_tp", "peer_cp"), [(1, 1, 2, 2), (2, 2, 1, 1), (4, 2, 2, 1), (2, 1, 4, 4)])
def test_a9_a10_latent_rows_go_to_each_context_rank_once_whatever_the_tensor_ranks(tp, cp, peer_tp, peer_cp):
    sender, receiver = latent(tp=tp, cp=cp), latent(tp=peer_tp, stages=(1, 3), cp=peer_cp)
    wrong, num_bytes = moved(sender, receiver, 100)
    assert wrong == 0
    assert num_bytes == peer_tp * 100 * 4 * sender.bytes_per_token_head


def test_a15_uneven_stages_have_pieces_of_their_own_size():
    """Stages of 5, 3 and 2 layers to 4 and 6: what the last rank takes from each (transfer spec 7.2)."""
    state = {"dtype": "bfloat16", "head_size": 128, "tokens_per_block": 64, "num_layers": 10, "num_kv_heads": 4}
    sender = make_state(**state, parallel=even(1, (5, 3, 2)))
    receiver = make_state(**state, parallel=even(1, (4, 6)))
    plans = receive_plans(receiver, Rank(1), sender, Span(0, 640))
    assert [plan.num_bytes // 2 for plan in plans] == [655_360, 1_966_080, 1_310_720]


@pytest.mark.parametrize("size", [4, 16, 64])
def test_b3_the_tail_of_a_window_is_what_the_next_token_sees(size):
    """One block more than the seed's count wherever the window lies badly; and counted from the last token wanted."""
    is_short = set()
    for window in range(1, 3 * size):
        for stop in range(1, 5 * size):
            needed = {token // size for token in range(max(0, stop - window + 1), stop)}
            seen = seen_by_next(Span(0, stop), window)
            assert set(seen.blocks(size)) == needed
            if len(needed) > window // size + 1:
                is_short.add(window % size)
    assert is_short == set(range(3, size))


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_b5_every_length_of_a_prompt_arrives_whole(num_tokens):
    sender, receiver = make_state(tokens_per_block=4), make_state(tokens_per_block=4, parallel=even(1))
    assert moved(sender, receiver, num_tokens)[0] == 0


def test_b11_an_ask_does_not_grow_with_its_prompt():
    short, long = (
        encode(msgspec.structs.replace(sample_of(Ask), tokens=Span(0, length), num_tokens=length))
        for length in (9, 1_000_000)
    )
    assert len(long) - len(short) < 16


def test_d11_a_grant_of_another_size_than_its_chunk_is_refused():
    state, ask, grant = make_state(), sample_of(Ask), sample_of(Grant)
    session = SendSession(ask.session, None, ask, 0.0)
    session.chunks = chunks_of(receive_plans(state, Rank(0), state, Span(0, 16))[0].pieces, Span(0, 16), state, 1 << 20)
    num_bytes = session.chunks[0].num_bytes

    def of(size):
        fitting = msgspec.structs.replace(grant.slice, num_bytes=size)
        return msgspec.structs.replace(grant, seq=0, slice=fitting)

    assert session.misfit(of(num_bytes)) == ""
    for wrong in (num_bytes - 1, num_bytes + 1, num_bytes // 2):
        assert f"ours={num_bytes}, theirs={wrong}" in session.misfit(of(wrong))
    assert "no such chunk" in session.misfit(msgspec.structs.replace(of(num_bytes), seq=len(session.chunks)))


def test_g7_g8_no_rank_waits_for_a_collective():
    """Ranks of one instance never call each other: what all of them must agree on follows from equal values."""
    words = re.compile(r"torch\.distributed|all_?gather|all_?reduce|barrier\(", re.IGNORECASE)
    sources = list((ROOT / "packages/kv-transfer/src").glob("**/*.py"))
    assert len(sources) > 50
    assert [path.name for path in sources if words.search(path.read_text())] == []


@pytest.mark.parametrize(("stages", "peer_stages"), [((12, 12), (8, 8, 8)), ((8, 8, 8), (12, 12)), ((24,), (5, 9, 10))])
def test_i1_i4_alternating_windows_and_stages_that_do_not_nest(stages, peer_stages):
    common = {"num_layers": 24, "windows": (0, 8) * 12, "tokens_per_block": 4}
    sender = make_state(**common, parallel=even(1, stages))
    receiver = make_state(**common, parallel=even(2, peer_stages))
    wrong, num_bytes = moved(sender, receiver, 30)
    assert wrong == 0
    # The next token sees 7 through its window; a third block holds the first of them.
    assert num_bytes == (12 * 30 + 12 * 10) * 4 * 2 * sender.bytes_per_token_head


def test_i4_layers_are_those_that_both_stages_hold():
    sender, receiver = (make_state(num_layers=24, parallel=even(1, stages)) for stages in ((12, 12), (8, 8, 8)))
    plans = receive_plans(receiver, Rank(1), sender, Span(0, 4))
    assert [(plan.sender, *(len(piece.layers) for piece in plan.pieces)) for plan in plans] == [(0, 4), (1, 4)]
    assert sum(plan.num_bytes for plan in plans) == 8 * 4 * 4 * 2 * sender.bytes_per_token_head
