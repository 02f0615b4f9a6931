"""Peers that die, restart, or only fall silent."""

import time
from dataclasses import replace
from threading import Event

from kv_core.spans import Span
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, SOON_S, Switches, fresh_id, hang_until, make_side, pair, sides, state_of
from kv_transfer import peers
from kv_transfer.agent.loopback import LoopbackHub


def _crash(side, hub):
    """As near to SIGKILL as one process comes: sockets gone, agent gone, nothing said."""
    for core, rank in zip(side.cores, side.ranks, strict=True):
        rank._reactor.post(lambda core=core: setattr(core, "close", lambda reason: None))
        rank._reactor.post(rank._reactor.end)
        rank._reactor.join(5)
    for agent in side.agents:
        hub.kill(agent.name)
    side.door.close()


def test_a_dead_sender_fails_the_load_fast_and_frees_its_regions():
    faults = Switches(holds_writes=True)
    with pair(state_of(2), state_of(1), config=replace(FAST, request_deadline_s=30), prefill_faults=faults) as (
        p,
        d,
        hub,
    ):
        d.order(p, p.offer())
        wait_for(lambda: faults.num_held, what="a held write")
        start = time.monotonic()
        _crash(p, hub)
        received = d.outcome()
        assert not received.ok
        assert "is dead" in received.reason
        assert time.monotonic() - start < SOON_S
        assert d.misplaced(Span(0, 0)) == 0
        d.check_clean()
        assert d.count("regions_freed_late") > 0
        assert d.ranks[0].status().gauges["peers"] == 0


def test_a_dead_receiver_frees_the_senders_blocks_before_any_deadline():
    faults = Switches(holds_writes=True)
    with pair(config=replace(FAST, request_deadline_s=30), prefill_faults=faults) as (p, d, hub):
        d.order(p, p.offer(lease_s=0.1))
        wait_for(lambda: faults.num_held, what="a held write")
        _crash(d, hub)
        faults.holds_writes = False
        p.check_clean(5)
        assert p.sent == [(0, "p0")]


def test_a_restarted_sender_is_another_peer():
    """Same addresses, another run: the old card is dropped, the new one asked for once, the load succeeds."""
    hub = LoopbackHub()
    p = make_side(hub, "p", state_of())
    with sides(make_side(hub, "d", state_of())) as (d,):
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        ports = [p.door.address[1], *(rank.card.port for rank in p.ranks)]
        _crash(p, hub)
        again = make_side(hub, "p", state_of(), ports=ports)
        with sides(again):
            transfer = again.offer()
            d.order(again, transfer, "d1")
            received = d.outcome("d1", others=[again])
            assert received.ok, received.reason
            d.release(again, transfer, "d1")
            d.check_clean()
            again.check_clean()


def test_a_sender_that_restarts_in_the_middle_of_a_load():
    hub = LoopbackHub()
    faults = Switches(holds_writes=True)
    config = replace(FAST, request_deadline_s=30)
    p = make_side(hub, "p", state_of(), config, faults)
    with sides(make_side(hub, "d", state_of(), config)) as (d,):
        d.order(p, p.offer())
        wait_for(lambda: faults.num_held, what="a held write")
        ports = [p.door.address[1], *(rank.card.port for rank in p.ranks)]
        _crash(p, hub)
        with sides(make_side(hub, "p", state_of(), config, ports=ports)) as (again,):
            start = time.monotonic()
            received = d.outcome()
            assert not received.ok
            assert "dead" in received.reason
            assert time.monotonic() - start < SOON_S
            d.check_clean()
            again.check_clean()


def test_a_receiver_that_restarts_and_asks_again():
    hub = LoopbackHub()
    faults = Switches(holds_writes=True)
    with sides(make_side(hub, "p", state_of(), FAST, faults)) as (p,):
        d = make_side(hub, "d", state_of())
        transfer = p.offer()
        d.order(p, transfer)
        wait_for(lambda: faults.num_held, what="a held write")
        ports = [d.door.address[1], *(rank.card.port for rank in d.ranks)]
        _crash(d, hub)
        faults.holds_writes = False
        with sides(make_side(hub, "d", state_of(), ports=ports)) as (again,):
            again.order(p, transfer)
            received = again.outcome(others=[p])
            assert received.ok, received.reason
            again.release(p, transfer)
            again.check_clean()
            p.check_clean()


def test_a_silent_peer_is_not_dead():
    """Its reactor hangs (as a stopped process does): deadlines end its sessions, its regions stay in quarantine."""
    go_on = Event()
    faults = Switches(holds_writes=True)
    with pair(config=replace(FAST, request_deadline_s=1.5), prefill_faults=faults) as (p, d, _):
        try:
            transfer = p.offer()
            d.order(p, transfer)
            wait_for(lambda: faults.num_held, what="a held write")
            p.ranks[0]._reactor.post(lambda: hang_until(go_on))
            received = d.outcome()
            assert "deadline of 1.5 s" in received.reason
            time.sleep(1.0)
            assert d.receive_arena().num_quarantined > 0
            assert d.count("peers_died") == 0
        finally:
            faults.holds_writes = False
            go_on.set()
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()


def test_an_idle_peer_is_forgotten_and_met_again():
    with pair(config=replace(FAST, peer_idle_s=0.3)) as (p, d, _):
        for number in range(2):
            transfer = p.offer(f"p{number}")
            d.order(p, transfer, f"d{number}")
            assert d.outcome(f"d{number}", others=[p]).ok
            d.release(p, transfer, f"d{number}")
            wait_for(lambda: not d.ranks[0].status().gauges["peers"], what="to be forgotten")
            wait_for(lambda: not p.ranks[0].status().gauges["peers"], what="to be forgotten")
        d.check_clean()
        p.check_clean()


def test_an_agent_forgets_the_dead_at_once_and_of_the_living_the_oldest(monkeypatch):
    """A connection that both ends survive is never closed: whoever only was idle is not to cost another one."""
    monkeypatch.setattr(peers, "MAX_PARTED", 1)
    with pair(state_of(2), config=replace(FAST, peer_idle_s=0.3)) as (p, d, hub):
        removed: list[str] = []
        forget = d.agents[0].remove_peer

        def note(name: str) -> None:
            removed.append(name)
            forget(name)

        monkeypatch.setattr(d.agents[0], "remove_peer", note)
        for number in range(3):
            transfer = p.offer(f"p{number}")
            d.order(p, transfer, f"d{number}")
            assert d.outcome(f"d{number}", others=[p]).ok
            d.release(p, transfer, f"d{number}")
            assert len(removed) == number, "met again, known still"
            wait_for(lambda: not d.ranks[0].status().gauges["peers"], what="to be forgotten")
        d.order(p, p.offer("last", lease_s=1.0), "last")
        assert d.outcome("last", others=[p]).ok
        _crash(p, hub)
        d.order(p, fresh_id(), "none")
        assert not d.outcome("none").ok
        assert {agent.name for agent in p.agents} <= set(removed)


def test_a_sender_that_forgot_its_peer_is_greeted_again():
    with pair() as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        # Peers with something open are not forgotten.
        wait_for(lambda: not p.ranks[0].status().gauges["sessions"], what="the end of the first session")
        forgotten = Event()
        p.ranks[0]._reactor.post(p.cores[0].peers.close)
        p.ranks[0]._reactor.post(forgotten.set)
        assert forgotten.wait(10)
        d.order(p, transfer, "d1")
        received = d.outcome("d1", others=[p])
        assert received.ok, received.reason
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()
