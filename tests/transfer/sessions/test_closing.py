"""Begin and end of a transceiver: ports, threads, sockets, and whatever was running."""

import gc
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kv_core.errors import FerryError
from kv_core.ids import Incarnation, InstanceId, Rank
from kv_testing.tagged import make_world
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, SOON_S, Switches, fresh_id, hang_until, make_side, pair, sides, state_of
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.orders import Errand
from kv_transfer.transceiver import Transceiver
from kv_transfer.wire import CannotListen


def _ferry_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("kvferry", "agent-"))]


def _num_descriptors():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_five_rounds_on_the_same_ports_with_transfers_running():
    hub = LoopbackHub()
    ports: list[int] = []
    before = None
    for number in range(5):
        faults = Switches(holds_writes=True)
        p = make_side(hub, "p", state_of(), FAST, faults, ports=ports)
        d = make_side(hub, "d", state_of())
        ports = [p.door.address[1], *(rank.card.port for rank in p.ranks)]
        d.order(p, p.offer())
        d.order(p, fresh_id(), "parked")
        _wait_for_a_held_write(faults)
        start = time.monotonic()
        faults.holds_writes = number % 2 == 0
        for side in (d, p) if number < 3 else (p, d):
            side.close(timeout_s=1.0)
        assert time.monotonic() - start < SOON_S
        for request_id in ("d0", "parked"):
            received = d.outcome(request_id)
            assert received.ok or "clos" in received.reason, received.reason
        assert _ferry_threads() == []
        before = before or _num_descriptors()
        assert _num_descriptors() <= before


def test_closing_twice_and_working_on_afterwards():
    with pair() as (p, d, _):
        for side in (d, p):
            side.close()
            side.close()
        d.order(p, fresh_id())
        assert d.outcome().reason == "closed"
        p.ranks[0].offer(p.make_offer(transfer_id="0" * 32))
        p.settle("0" * 32)
        p.step()
        assert p.sent == [(0, "p0")]
        d.door.release(Errand("127.0.0.1", 7777, fresh_id(), b"k", "c"))
        assert _ferry_threads() == []


def test_a_port_in_use_fails_in_the_constructor_by_name():
    with pair() as (p, _, _hub):
        start = time.monotonic()
        taken = p.ranks[0].card.port
        hub = LoopbackHub()
        with pytest.raises(
            CannotListen, match=rf"host='127.0.0.1' \(setting bind_host\), port={taken} \(setting port\)"
        ):
            make_side(hub, "x", state_of(), ports=[0, taken])
        with pytest.raises(CannotListen, match=f"port={p.door.address[1]}"):
            make_side(hub, "x", state_of(), ports=[p.door.address[1], 0])
        assert time.monotonic() - start < SOON_S
        assert issubclass(CannotListen, FerryError)


def test_an_address_that_is_not_ours_fails_by_name():
    with pytest.raises(CannotListen, match=r"host='192\.0\.2\.1'"):
        make_side(LoopbackHub(), "x", state_of(), replace(FAST, bind_host="192.0.2.1"))


def test_listening_at_one_address_and_advertising_another():
    hub = LoopbackHub()
    config = replace(FAST, bind_host="0.0.0.0", advertised_host="127.0.0.1")
    with sides(make_side(hub, "p", state_of(), config), make_side(hub, "d", state_of(), config)) as (p, d):
        assert p.door.address[0] == p.ranks[0].card.host == "127.0.0.1"
        d.order(p, p.offer())
        assert d.outcome(others=[p]).ok


def test_host_names_can_be_listened_at():
    config = replace(FAST, bind_host="localhost")
    hub = LoopbackHub()
    with sides(make_side(hub, "p", state_of(), config), make_side(hub, "d", state_of(), config)) as (p, d):
        d.order(p, p.offer())
        assert d.outcome(others=[p]).ok


def test_caches_that_are_not_as_stated_are_refused_before_anything_starts():
    hub = LoopbackHub()
    caches = make_world(state_of(2), 8, "CBHTD", 0).caches[Rank(0)]
    agent = hub.agent()
    with pytest.raises(ValueError, match="the caches are not as stated: heads"):
        Transceiver(FAST, InstanceId("x"), Incarnation("x-1"), Rank(0), state_of(1), caches, agent)
    agent.close(1.0)
    assert [name for name in _ferry_threads() if not name.startswith("agent-")] == []


def _wait_for_a_held_write(faults):
    wait_for(lambda: faults.num_held, what="a held write")


class _Bug(BaseException):
    """Passes every boundary that catches Exception."""


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_reactor_that_dies_reports_everything(side):
    faults = Switches(holds_writes=True)
    with pair(prefill_faults=faults, config=replace(FAST, request_deadline_s=30)) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        wait_for(lambda: faults.num_held, what="a held write")

        def bug():
            raise _Bug("planted")

        if side == "d":
            d.ranks[0]._reactor.post(bug)
            received = d.outcome()
            assert "the transfer layer has failed" in received.reason
            assert "planted" in received.reason
            d.order(p, transfer, "d1")
            assert "has failed" in d.outcome("d1").reason
            faults.holds_writes = False
        else:
            p.ranks[0]._reactor.post(bug)
            wait_for(lambda: not p.ranks[0]._reactor.is_alive, what="the end of the thread")
            p.settle(transfer)
            p.step()
            assert p.sent == [(0, "p0")]
            assert "dead" in d.outcome().reason


def test_an_error_of_our_own_does_not_end_the_thread():
    with pair() as (p, d, _):

        def bug():
            raise RuntimeError("planted")

        d.ranks[0]._reactor.post(bug)
        d.cores[0]._room.timers.after(0, bug)
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        d.release(p, transfer)
        d.check_clean()
        assert d.count("internal_errors") >= 1


def test_engine_facing_calls_do_not_wait_for_a_busy_reactor():
    with pair() as (p, d, _):
        go_on = threading.Event()
        d.ranks[0]._reactor.post(lambda: hang_until(go_on))
        start = time.monotonic()
        d.order(p, p.offer())
        d.abort("d0")
        d.ranks[0].poll()
        d.ranks[0].status()
        assert time.monotonic() - start < SOON_S
        go_on.set()
        d.outcome(others=[p])
