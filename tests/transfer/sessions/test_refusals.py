"""Pairs that cannot exchange say so at once, with every reason and both values; the ends stay usable."""

import time

import msgspec
import pytest

from kv_core.errors import CallerError
from kv_core.ids import RequestId
from kv_core.spans import Span
from kv_testing.worlds import PROMPT, SOON_S, fresh_id, make_side, pair, sides, state_of
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.plan.cache_state import BlockLayout


def test_two_models_of_one_shape_are_told_apart_by_both_fingerprints():
    other = msgspec.structs.replace(state_of(), fingerprint="other weights")
    with pair(other, state_of()) as (p, d, _):
        start = time.monotonic()
        d.order(p, p.offer())
        received = d.outcome(others=[p])
        assert not received.ok
        assert "fingerprint differs: ours=model, theirs=other weights" in received.reason
        assert time.monotonic() - start < SOON_S
        p.withdraw("p0", "test")
        p.check_clean()
        d.check_clean()


def test_all_reasons_are_told_at_once():
    other = msgspec.structs.replace(
        state_of(), dtype="bfloat16", head_size=8, fingerprint="x", layout=BlockLayout("token_major", "packed")
    )
    hub = LoopbackHub()
    with sides(make_side(hub, "p", state_of()), make_side(hub, "d", state_of())) as (p, d):
        card = msgspec.structs.replace(p.ranks[0].card, state=other)
        p.door.set_cards([card])
        d.order(p, p.offer())
        reason = d.outcome(others=[p]).reason
        for field in ("fingerprint", "dtype", "head_size", "tile"):
            assert f"{field} differs: ours=" in reason


def test_a_rank_that_contradicts_its_instance_is_refused():
    """The door says one model, the rank another: found out at the Hello, by the side that sees it."""
    hub = LoopbackHub()
    other = msgspec.structs.replace(state_of(), fingerprint="other weights")
    with sides(make_side(hub, "p", other), make_side(hub, "d", state_of())) as (p, d):
        p.door.set_cards([msgspec.structs.replace(p.ranks[0].card, state=state_of())])
        d.order(p, fresh_id())
        reason = d.outcome(others=[p]).reason
        assert "cannot exchange: fingerprint differs: ours=model, theirs=other weights" in reason
        d.check_clean()


def test_agents_of_different_kinds_are_refused():
    hub = LoopbackHub()
    p, d = make_side(hub, "p", state_of()), make_side(hub, "d", state_of())
    with sides(p, d):
        room = d.cores[0]._room
        identity = room.identity
        foreign = msgspec.structs.replace(identity.agent, kind="pigeon")
        object.__setattr__(identity, "agent", foreign)
        d.order(p, fresh_id())
        reason = d.outcome(others=[p]).reason
        assert "agent differs: ours=pigeon, theirs=loopback" in reason


def test_a_run_that_no_peer_would_read_fails_the_load_at_once():
    with pair() as (p, d, _):
        d.order(p, fresh_id(), incarnation="r" * 201)
        assert "would be refused by every peer" in d.outcome(others=[p]).reason
        d.check_clean()


@pytest.mark.parametrize("host", ["no such host", "a;b", "", "x" * 300])
def test_addresses_that_are_none_fail_the_load_at_once(host):
    with pair() as (_, d, _hub):
        d.ranks[0].receive(d.make_order(host, 7777, fresh_id()))
        assert "not an address to call" in d.outcome().reason
        d.check_clean()


def test_a_door_where_nobody_listens_fails_the_load_fast():
    with pair() as (p, d, _):
        p.door.close()
        start = time.monotonic()
        d.order(p, fresh_id())
        assert "nobody listens at its door" in d.outcome().reason
        assert time.monotonic() - start < SOON_S
        d.check_clean()


def test_a_door_without_cards_is_asked_again_until_it_has_some():
    hub = LoopbackHub()
    with sides(make_side(hub, "p", state_of()), make_side(hub, "d", state_of())) as (p, d):
        p.door._reactor.post(lambda: setattr(p.door._porter, "_card", None))
        transfer = p.offer()
        d.order(p, transfer)
        time.sleep(0.4)
        p.door.set_cards([rank.card for rank in p.ranks])
        assert d.outcome(others=[p]).ok


def test_blocks_that_do_not_hold_the_tokens_are_the_callers_error():
    with pair() as (p, d, _):
        with pytest.raises(CallerError, match=r"wanted=\[0, 4000\), num_tokens=40"):
            d.order(p, fresh_id(), tokens=Span(0, 4000))
        assert not d.open()
        with pytest.raises(CallerError, match="too few blocks"):
            p.ranks[0].offer(p.make_offer(num_tokens=4000))
        assert not p.open()


def test_one_order_and_one_offer_a_request():
    with pair() as (p, d, _):
        transfer = fresh_id()
        d.order(p, transfer)
        with pytest.raises(CallerError, match="an order already"):
            d.order(p, transfer)
        p.offer(transfer_id=transfer)
        with pytest.raises(CallerError, match="offered already"):
            p.ranks[0].offer(p.make_offer(num_tokens=40))
        with pytest.raises(CallerError, match="offered already"):
            p.door.open_offer(transfer, RequestId("p0"), PROMPT)
        assert d.outcome(others=[p]).ok
        d.release(p, transfer)
        p.check_clean()
        p.offer(transfer_id=transfer)
