"""Cancel at every step, from either side: one outcome, nothing left, the next request works."""

import time

import pytest

from kv_testing.waiting import wait_for
from kv_testing.worlds import SOON_S, Switches, fresh_id, pair, state_of

STEPS = {
    "before the card": ("p-door", {"InstanceCard"}),
    "before the introduction": ("p", {"HelloReply"}),
    "asked, not heard": ("d", {"Ask"}),
    "ready, not heard": ("p", {"Ready"}),
    "granted, not heard": ("d", {"Grant"}),
    "written, not heard": ("p", {"Data"}),
}


def _frozen(side, kinds):
    faults = Switches(dropped=set(kinds))
    return ({"prefill_faults": faults} if side == "p" else {"decode_faults": faults}), faults


@pytest.mark.parametrize(("side", "kinds"), list(STEPS.values())[1:], ids=list(STEPS)[1:])
def test_abort_at_the_receiver(side, kinds):
    settings, faults = _frozen(side, kinds)
    with pair(state_of(2), state_of(1), **settings) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        wait_for(lambda: sum(faults.num_said[kind] for kind in kinds) >= 2, what=f"{kinds}")
        d.abort("d0")
        start = time.monotonic()
        received = d.outcome(others=[p])
        assert received.reason == "aborted by the engine"
        assert time.monotonic() - start < SOON_S
        faults.dropped = set()
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()
        _next_request_works(p, d)


def test_abort_before_the_card():
    with pair(state_of(2), state_of(1)) as (p, d, _):
        p.door._reactor.post(lambda: setattr(p.door._porter, "_card", None))
        d.order(p, fresh_id())
        time.sleep(0.1)
        d.abort("d0")
        assert d.outcome(others=[p]).reason == "aborted by the engine"
        p.door.set_cards([rank.card for rank in p.ranks])
        d.check_clean()
        _next_request_works(p, d)


def test_abort_while_a_write_is_under_way():
    faults = Switches(holds_writes=True)
    with pair(state_of(2), state_of(1), prefill_faults=faults) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        wait_for(lambda: faults.num_held, what="a held write")
        d.abort("d0")
        assert d.outcome(others=[p]).reason == "aborted by the engine"
        assert d.receive_arena().num_quarantined > 0
        faults.holds_writes = False
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()
        _next_request_works(p, d)


def test_abort_of_a_parked_ask():
    with pair() as (p, d, _):
        d.order(p, fresh_id())
        wait_for(lambda: p.ranks[0].status().gauges["parked"], what="a parked ask")
        d.abort("d0")
        assert d.outcome(others=[p]).reason == "aborted by the engine"
        d.check_clean()
        p.check_clean()
        _next_request_works(p, d)


def test_abort_of_what_is_over_changes_nothing():
    with pair() as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        d.abort("d0")
        d.abort("never heard of")
        d.release(p, transfer)
        d.check_clean()
        assert len(d.received) == 1


@pytest.mark.parametrize(("side", "kinds"), list(STEPS.values())[1:], ids=list(STEPS)[1:])
def test_withdrawal_at_the_sender(side, kinds):
    """The prefill engine aborts: who has not begun is refused, who reads reads on."""
    settings, faults = _frozen(side, kinds)
    with pair(state_of(2), state_of(1), **settings) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        wait_for(lambda: sum(faults.num_said[kind] for kind in kinds) >= 2, what=f"{kinds}")
        has_begun = not kinds & {"HelloReply", "Ask"}
        if has_begun:  # at every rank: one rank may say it again before the other says it at all
            wait_for(lambda: all(rank.status().gauges["sessions_sending"] for rank in p.ranks), what="both sessions")
        p.withdraw("p0", "aborted")
        wait_for(lambda: (p.step(), p.door.status().gauges["offers"] == 0)[1], what="the withdrawal")
        p.step()
        time.sleep(0.1)
        faults.dropped = set()
        received = d.outcome(others=[p])
        assert received.ok or "gone" in received.reason, received.reason
        assert received.ok == has_begun
        d.check_clean()
        p.check_clean()
        assert sorted(p.sent) == [(0, "p0"), (1, "p0")]
        _next_request_works(p, d)


def test_every_second_of_many_is_aborted():
    with pair(state_of(2), state_of(2)) as (p, d, _):
        transfers = [p.offer(f"p{number}") for number in range(16)]
        for number, transfer in enumerate(transfers):
            d.order(p, transfer, f"d{number}")
            if number % 2:
                d.abort(f"d{number}")
        for number, transfer in enumerate(transfers):
            outcomes = d.outcomes(f"d{number}", others=[p])
            assert number % 2 or all(each.ok for each in outcomes), outcomes
            d.release(p, transfer, f"d{number}")
        d.check_clean()
        p.check_clean()


def _next_request_works(p, d):
    transfer = p.offer("next")
    d.order(p, transfer, "next")
    received = d.outcome("next", others=[p])
    assert received.ok, received.reason
    assert d.misplaced() == 0
    d.release(p, transfer, "next")
    d.check_clean()
    p.check_clean()
