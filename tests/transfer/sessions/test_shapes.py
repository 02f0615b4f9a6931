"""Whole hand-overs between instances of different shapes: every byte where it belongs, nothing left open."""

import pytest

from kv_core.spans import Span
from kv_testing.worlds import ALL, FAST, NUM_TOKENS, PROMPT, fresh_id, pair, state_of

SHAPES = {
    "tp1-tp1": ({"tp": 1}, {"tp": 1}),
    "tp2-tp1": ({"tp": 2}, {"tp": 1}),
    "tp1-tp2": ({"tp": 1}, {"tp": 2}),
    "tp3-tp2": ({"tp": 3}, {"tp": 2}),
    "pp13-pp22": ({"stages": (1, 3)}, {"stages": (2, 2)}),
    "pp22-tp2": ({"stages": (2, 2)}, {"tp": 2}),
    "empty stage": ({"stages": (0, 4)}, {"stages": (4, 0)}),
    "more ranks than heads": ({"tp": 6}, {"tp": 1}),
    "other blocks": ({"tokens_per_block": 4, "order": "head_major"}, {"tokens_per_block": 8, "order": "token_major"}),
}


@pytest.mark.parametrize(("prefill", "decode"), SHAPES.values(), ids=SHAPES)
def test_hand_over_between_shapes(prefill, decode):
    with pair(state_of(**prefill), state_of(**decode)) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        received = d.outcomes(others=[p])
        assert all(each.ok for each in received), received
        assert d.misplaced() == 0
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()
        assert sorted(p.sent) == [(rank, "p0") for rank in range(len(p.ranks))]
        num_bytes = sum(each.num_bytes for each in received)
        assert num_bytes == sum(plane[0].numel() * 4 * 10 for c in d.world.caches.values() for plane in c.planes) // (
            d.world.state.tokens_per_block // 4
        )
        assert p.count("bytes_out") == num_bytes == d.count("bytes_in")


@pytest.mark.parametrize("tokens", [Span(0, 1), Span(39, 40), Span(3, 4), Span(4, 8), Span(7, 33)], ids=str)
def test_only_the_wanted_tokens_travel(tokens):
    with pair(state_of(2), state_of(1)) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer, tokens=tokens)
        received = d.outcome(others=[p])
        assert received.ok, received.reason
        assert d.misplaced(tokens) == 0
        assert received.num_bytes == len(tokens) * 4 * 2 * 4 * 16
        d.check_clean()


def test_the_empty_span_is_a_success_without_a_message():
    with pair() as (p, d, _):
        d.order(p, fresh_id(), tokens=Span(NUM_TOKENS, NUM_TOKENS))
        received = d.outcome()
        assert (received.ok, received.num_bytes, received.num_senders) == (True, 0, 0)
        assert d.count("messages_out") == 0


def test_siblings_are_served_and_freed_one_by_one():
    """n = 3: three offers of one pair, three consumers; each release frees one request, the last ends the pair."""
    with pair(state_of(2), state_of(1)) as (p, d, _):
        transfer = fresh_id()
        for number in range(3):
            p.offer(f"p{number}", transfer)
        for number in range(3):
            d.order(p, transfer, f"d{number}")
        for number in range(3):
            assert d.outcome(f"d{number}", others=[p]).ok
            d.release(p, transfer, f"d{number}")
        p.check_clean()
        assert sorted(p.sent) == sorted((rank, f"p{number}") for rank in range(2) for number in range(3))
        d.order(p, transfer, "late")
        late = d.outcome("late", others=[p])
        assert not late.ok
        assert "gone: the offer" in late.reason
        assert "released" in late.reason
        d.check_clean()


def test_several_prompts_of_one_request_have_pairs_of_their_own():
    with pair() as (p, d, _):
        transfer = fresh_id()
        p.offer("a", transfer, prompt_key=b"a" * 32, num_tokens=8)
        p.offer("b", transfer, prompt_key=b"b" * 32)
        d.order(p, transfer, "da", Span(0, 8), prompt_key=b"a" * 32)
        d.order(p, transfer, "db", prompt_key=b"b" * 32)
        assert d.outcome("da", others=[p]).ok
        assert d.outcome("db", others=[p]).ok
        d.order(p, transfer, "dc", prompt_key=b"a" * 32)
        refused = d.outcome("dc", others=[p])
        assert "tokens are not offered: wanted=[0, 40), offered=[0, 8)" in refused.reason
        d.release(p, transfer, "da", b"a" * 32)
        d.release(p, transfer, "db", b"b" * 32)
        p.check_clean()
        d.check_clean()


def test_both_directions_at_once():
    with pair(state_of(2), state_of(1)) as (p, d, _):
        there, back = p.offer("p0"), None
        d.order(p, there)
        assert d.outcome(others=[p]).ok
        assert d.misplaced() == 0
        back = d.offer("d-offer", prompt_key=PROMPT)
        p.order(d, back, "p-order")
        d.order(p, there, "d1")
        assert p.outcome("p-order", others=[d]).ok
        assert d.outcome("d1", others=[p]).ok
        assert p.misplaced() == 0
        d.release(p, there)
        p.release(d, back, "p-order")
        p.check_clean()
        d.check_clean()


def test_times_are_told():
    with pair() as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        times = d.outcome(others=[p]).times
        assert 0 < times.ask_s < times.total_s
        assert 0 < times.wire_s < times.total_s
        assert 0 < times.scatter_s < times.total_s


def test_many_requests_share_the_wire():
    config = FAST
    with pair(state_of(2), state_of(2), config=config) as (p, d, _):
        transfers = [p.offer(f"p{number}") for number in range(24)]
        for number, transfer in enumerate(transfers):
            d.order(p, transfer, f"d{number}")
        for number, transfer in enumerate(transfers):
            assert d.outcome(f"d{number}", others=[p]).ok
            d.release(p, transfer, f"d{number}")
        assert d.misplaced(ALL) == 0
        d.check_clean()
        p.check_clean()
