"""One of our threads fails, or hangs in a call: what it was doing ends in a reported failure, and nothing lies.

The table of docs/decisions/0005-threads-that-fail.md, row by row, over real threads. Laws of every row: each order is
reported once, by its deadline unless a copy is at work in its very blocks; what is new is refused at once, with the
reason; Quiet is not said for what may still be written; closing does not wait.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kv_core.ids import SessionId
from kv_testing.hangs import Plant, planted
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, SOON_S, Side, Switches, fresh_id, make_side, pair, sides
from kv_testing.worlds import state_of as usual_state
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.agent.pump import PumpLimits
from kv_transfer.protocol.messages import Message, Quiet

STALL_S = 0.4
QUICK = replace(FAST, stall_s=STALL_S, request_deadline_s=4.0)
"""Threads are found to hang soon, loads end soon."""

PATIENT = replace(FAST, stall_s=STALL_S)
"""Loads whose deadline would come long after the test has lost its patience."""


@dataclass
class Overheard(Switches):
    """Also notes of which sessions a side has said Quiet; of one that was never served it may."""

    quiet: set[SessionId] = field(default_factory=set)

    def outgoing(self, message: Message) -> Sequence[float]:
        if isinstance(message, Quiet):
            self.quiet.add(message.session)
        return super().outgoing(message)


def _in_doubt(side: Side) -> set[SessionId]:
    """Sessions that wait to hear of what was granted."""
    found = {name for name, each in side.cores[0].loads.receiver._sessions.items() if each.doubted}
    assert found, "something is in doubt"
    return found


@contextmanager
def world(config=QUICK) -> Iterator[tuple[Side, Side, Overheard]]:
    """A prefill and a decode side whose agents give up soon on threads that hang; the faults of the prefill side."""
    hub, faults = LoopbackHub(), Overheard()
    agents = [hub.agent(limits=PumpLimits(patience_s=STALL_S)) for _ in range(2)]
    p = make_side(hub, "p", usual_state(), config, faults, agents=agents[:1])
    d = make_side(hub, "d", usual_state(), config, agents=agents[1:])
    with sides(p, d):
        yield p, d, faults


def _transport(side: Side) -> Any:
    agent: Any = side.agents[0]
    return agent._transport


def _summer(side: Side):
    """Called by the copy thread in each gather and each scatter."""
    return side.cores[0].sender.passages._copier._summer


def _refused_at_once(d: Side, p: Side, request_id: str = "new") -> str:
    """Why the next order fails: not by its deadline, if that is the reason which is expected."""
    d.order(p, fresh_id(), request_id)
    return d.outcome(request_id, others=[p]).reason


def _wait_for_trouble(side: Side, what: str) -> None:
    """Until just this is the matter: a reactor may have waited for the thread, and is seen to go on a moment later."""

    def is_seen() -> bool:
        said = side.ranks[0].status().trouble.split("; ")
        return len(said) == 1 and what in said[0]

    wait_for(is_seen, what=f"the trouble to be seen: {what}")


def _closes(*those: Side) -> None:
    began = time.monotonic()
    for side in those:
        side.ranks[0].close(1.0)
    assert time.monotonic() - began < SOON_S


# -- the agent's thread ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["post", "poll"])
def test_the_senders_agent_fails_with_a_write_under_way(call) -> None:
    """Whether its bytes will land is not known: so no Quiet, and what was granted stays in quarantine."""
    with world(PATIENT) as (p, d, said), planted(_transport(p), call) as plant:
        transfer = p.offer()
        plant.kill()
        d.order(p, transfer)
        received = d.outcome(others=[p])
        assert not received.ok
        assert re.search(r"thread (has )?failed: Bug\('planted'\)", received.reason), "its receiver is told"
        assert "sends nothing new: the agent's thread has failed" in _refused_at_once(d, p)
        _wait_for_trouble(p, "the agent's thread has failed")
        assert p.ranks[0].status().gauges["threads_troubled"] == 1
        d.release(p, transfer)
        wait_for(lambda: p.step() == [(0, "p0")], what="the blocks, which nobody reads any more")
        kept = wait_for(lambda: d.ranks[0].status().gauges["quarantined"], what="the quarantine")
        staged = p.ranks[0].status().gauges["staged_bytes"]
        assert staged > 0, "what is written from stays as it is"
        time.sleep(2.0)
        d.step()
        assert d.ranks[0].status().gauges["quarantined"] == kept
        assert not said.quiet & _in_doubt(d)
        _closes(p, d)


def test_the_senders_agent_fails_at_rest() -> None:
    """Nothing was under way: whoever is served is told at once, and may take its memory back."""
    with world(PATIENT) as (p, d, faults):
        faults.holds_writes = True
        transfer = p.offer()
        d.order(p, transfer)
        wait_for(lambda: faults.num_held, what="a held write")
        p.agents[0].pulse.ends("Bug('planted')")
        reason = d.outcome(others=[p]).reason
        assert "the agent's thread has failed" in reason
        faults.holds_writes = False
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()


def test_the_senders_agent_hangs_and_goes_on() -> None:
    with world() as (p, d, said), planted(_transport(p), "post") as plant:
        transfer = p.offer()
        plant.hang()
        d.order(p, transfer)
        plant.wait_until_met()
        _wait_for_trouble(p, "the agent's thread hangs: it has been in 'post'")
        assert "sends nothing new: the agent's thread hangs" in _refused_at_once(d, p)
        received = d.outcome(others=[p])
        assert "deadline" in received.reason
        assert not said.quiet & _in_doubt(d)
        wait_for(lambda: d.ranks[0].status().gauges["quarantined"], what="the quarantine")
        plant.go_on()
        wait_for(lambda: not p.ranks[0].status().trouble, what="the end of the trouble")
        d.release(p, transfer)
        for side in (p, d):
            side.check_clean()
        again = p.offer("p1")
        d.order(p, again, "d1")
        assert d.outcome("d1", others=[p]).ok


@pytest.mark.parametrize("call", ["add_peer", "poll"])
def test_the_receivers_agent_hangs(call) -> None:
    """Its reactor asks it to add the peer, and does not wait for ever: other orders have their deadlines too."""
    with world() as (p, d, _), planted(_transport(d), call) as plant:
        if call == "poll":
            # Something of its own to look at, so that it hangs before the peer is met.
            part = d.arenas[0].region.slice(0, 64)
            d.agents[0].add_peer(p.agents[0].card())
            plant.hang()
            d.agents[0].write(p.agents[0].name, [(part, p.arenas[1].region.slice(0, 64).remote)])
            plant.wait_until_met()
        plant.hang()
        transfer = p.offer()
        d.order(p, transfer)
        d.order(p, fresh_id(), "late")
        assert not d.outcome("d0", others=[p]).ok or call == "poll"
        assert not d.outcome("late", others=[p]).ok
        _wait_for_trouble(d, "the agent's thread hangs")
        assert "nothing can be loaded: the agent's thread hangs" in _refused_at_once(d, p)
        _closes(d, p)


def test_the_receivers_agent_fails() -> None:
    """A load that is under way needs it no more, and ends well; the next is refused."""
    with world(PATIENT) as (p, d, faults):
        faults.holds_writes = True
        transfer = p.offer()
        d.order(p, transfer)
        wait_for(lambda: faults.num_held, what="a held write")
        with planted(_transport(d), "blob") as plant:
            plant.kill()
            with pytest.raises(BaseException, match="planted"):
                d.agents[0].card()
        _wait_for_trouble(d, "the agent's thread has failed")
        assert "nothing can be loaded: the agent's thread has failed" in _refused_at_once(d, p)
        faults.holds_writes = False
        assert d.outcome(others=[p]).ok
        assert not d.misplaced()
        _closes(d, p)


def test_the_agent_fails_while_closing() -> None:
    with world() as (p, d, _), planted(_transport(p), "close") as plant:
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        plant.kill()
        _closes(p, d)
        assert plant.num_met == 1
        p.settle(transfer)
        assert p.step() == [(0, "p0")]


def test_after_a_death_nothing_is_freed_while_our_own_agent_does_not_get_on() -> None:
    """What the dead peer had sent may lie in our sockets, and whoever reads them may be held up with our thread."""
    with world() as (p, d, faults), planted(_transport(d), "poll") as plant:
        faults.holds_writes = True
        d.order(p, p.offer())
        wait_for(lambda: faults.num_held, what="a held write")
        part = d.arenas[0].region.slice(0, 64)
        plant.hang()
        d.agents[0].write(p.agents[0].name, [(part, p.arenas[1].region.slice(0, 64).remote)])
        plant.wait_until_met()
        p.ranks[0]._reactor.discard()  # its address refuses from now on
        assert not d.outcome().ok
        time.sleep(2.5)
        d.step()
        assert d.ranks[0].status().gauges["quarantined"] > 0
        plant.go_on()
        wait_for(lambda: not d.ranks[0].status().gauges["quarantined"], what="the memory")


# -- the copy thread -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["p", "d"])
def test_the_copy_thread_fails(who) -> None:
    """Every copy ends badly, the one that runs, those that wait and those to come."""
    with world(PATIENT) as (p, d, _):
        side = {"p": p, "d": d}[who]
        with planted(_summer(side), "checksum") as plant:
            transfer = p.offer()
            plant.kill()
            d.order(p, transfer)
            assert "the copy thread has failed: Bug('planted')" in d.outcome(others=[p]).reason
            assert "the copy thread has failed" in _refused_at_once(d, p)
            _wait_for_trouble(side, "the copy thread has failed")
            d.release(p, transfer)
            for each in (p, d):
                each.check_clean()
            assert p.sent == [(0, "p0")]
            _closes(p, d)


def test_the_receivers_copy_thread_hangs_in_one_order_and_keeps_nobody_elses_blocks() -> None:
    with world() as (p, d, _), planted(_summer(d), "checksum") as plant:
        transfers = [p.offer(f"p{number}") for number in range(2)]
        plant.hang()
        d.order(p, transfers[0], "inside")
        plant.wait_until_met()
        d.order(p, transfers[1], "behind")
        assert "deadline" in d.outcome("behind", others=[p]).reason, "queued behind it: taken back"
        assert "nothing can be loaded: the copy thread hangs: it has been in 'copy'" in _refused_at_once(d, p)
        assert "inside" not in {each.request_id for _, each in d.received}, "its blocks may still be written"
        plant.go_on()
        assert "deadline" in d.outcome("inside", others=[p]).reason
        assert d.misplaced(), "neither prompt is complete"
        for number, transfer in enumerate(transfers):
            d.release(p, transfer, ("inside", "behind")[number])
        for each in (p, d):
            each.check_clean()
        p.offer("p3", transfer_id="3" * 32)
        d.order(p, "3" * 32, "d3")
        assert d.outcome("d3", others=[p]).ok
        assert not d.misplaced()


def test_the_senders_copy_thread_hangs_in_one_offer_and_keeps_nobody_elses_blocks() -> None:
    with world() as (p, d, _), planted(_summer(p), "checksum") as plant:
        transfers = [p.offer(f"p{number}", num_tokens=40) for number in range(2)]
        plant.hang()
        d.order(p, transfers[0], "d0")
        plant.wait_until_met()
        d.order(p, transfers[1], "d1")
        assert not d.outcome("d1", others=[p]).ok
        assert not d.outcome("d0", others=[p]).ok
        for number, transfer in enumerate(transfers):
            d.release(p, transfer, f"d{number}")
        wait_for(lambda: p.step() == [(0, "p1")], what="the blocks that are only queued to be read")
        time.sleep(0.3)
        assert p.step() == [(0, "p1")], "the other is being read"
        plant.go_on()
        wait_for(lambda: p.step() == [(0, "p1"), (0, "p0")], what="the other's end")
        for each in (p, d):
            each.check_clean()


@pytest.mark.parametrize("who", ["p", "d"])
def test_closing_does_not_wait_for_a_copy_that_hangs(who, monkeypatch) -> None:
    monkeypatch.setattr("kv_transfer.resident.MOVER_CLOSE_S", 0.3)
    with world() as (p, d, _):
        side = {"p": p, "d": d}[who]
        with planted(_summer(side), "checksum") as plant:
            plant.hang()
            transfer = p.offer()
            d.order(p, transfer)
            plant.wait_until_met()
            _closes(side)
            wait_for(lambda: not side.ranks[0]._reactor.is_alive, what="the end of the reactor")
            p.settle(transfer)
            side.step()
            assert (side.received, side.sent) == ([], []), "the copy may still touch its blocks"
            plant.go_on()
            if side is d:
                assert d.outcome().reason == "closed" or "clos" in d.outcome().reason
            else:
                wait_for(lambda: p.step() == [(0, "p0")], what="the blocks")


# -- the reactor -----------------------------------------------------------------------------------------------------


def _hang_reactor(side: Side) -> Plant:
    plant = Plant(side.cores[0], "turn")
    plant.hang()
    side.ranks[0]._reactor.wake()
    plant.wait_until_met()
    return plant


def test_the_receivers_reactor_hangs() -> None:
    """The engine's own thread ends the orders; what the reactor says of them later is not told again."""
    with world() as (p, d, faults):
        faults.holds_writes = True
        transfer = p.offer()
        d.order(p, transfer)
        wait_for(lambda: faults.num_held, what="a held write")
        plant = _hang_reactor(d)
        try:
            _wait_for_trouble(d, "the reactor hangs: it has been in 'turn'")
            assert "the reactor hangs" in _refused_at_once(d, p)
            assert "the reactor hangs" in d.outcome(others=[p]).reason
            d.order(p, transfer, "new")  # the name of an order that has ended may be used again
            d.received.clear()
            assert "the reactor hangs" in d.outcome("new").reason
        finally:
            plant.go_on()
        faults.holds_writes = False
        wait_for(lambda: not d.ranks[0].status().trouble, what="the end of the trouble")
        wait_for(lambda: d.step() == [] and not d.ranks[0]._given_up.total(), what="late news, which nobody is told")
        d.received.clear()
        d.order(p, transfer, "new")
        assert d.outcome("new", others=[p]).ok
        assert not d.misplaced()
        assert [each.request_id for _, each in d.received] == ["new"]
        d.release(p, transfer, "new")
        for side in (p, d):
            side.check_clean()


def test_the_senders_reactor_hangs() -> None:
    with world() as (p, d, _):
        transfer = p.offer()
        plant = _hang_reactor(p)
        try:
            _wait_for_trouble(p, "the reactor hangs")
            d.order(p, transfer)
            assert "deadline" in d.outcome(others=[p]).reason
            late = p.offer("p1")
            p.settle(late, "p1")
            p.step()
            assert p.sent == [(0, "p1")], "never offered, so nobody reads it"
            d.release(p, transfer)
            p.settle(transfer)
        finally:
            plant.go_on()
        wait_for(lambda: p.step() == [(0, "p1"), (0, "p0")], what="the blocks")


def test_the_reactor_fails_while_a_copy_hangs(monkeypatch) -> None:
    """Only the order whose blocks are at stake waits."""
    monkeypatch.setattr("kv_transfer.resident.MOVER_CLOSE_S", 0.3)
    with world() as (p, d, _), planted(_summer(d), "checksum") as plant:
        plant.hang()
        d.order(p, p.offer("p0"), "inside")
        plant.wait_until_met()
        d.order(p, p.offer("p1"), "behind")
        with planted(d.cores[0], "turn") as turn:
            turn.kill()
            d.ranks[0]._reactor.wake()
            wait_for(lambda: not d.ranks[0]._reactor.is_alive, what="the end of the reactor")
        assert "the transfer layer has failed: Bug('planted')" in d.outcome("behind").reason
        assert [each.request_id for _, each in d.received] == ["behind"]
        plant.go_on()
        assert "the transfer layer has failed" in d.outcome("inside").reason


def test_no_plant_no_trouble() -> None:
    """Else the rows above would prove nothing."""
    with pair(config=QUICK) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        time.sleep(3 * STALL_S)
        assert [side.ranks[0].status().trouble for side in (p, d)] == ["", ""]
        assert [side.ranks[0].status().gauges["threads_troubled"] for side in (p, d)] == [0, 0]
