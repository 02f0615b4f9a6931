"""The agent's thread fails, or hangs in a call: what it was doing ends in a reported failure, and nothing lies.

The agent's rows of the table of docs/decisions/0005-threads-that-fail.md; laws and other rows:
`test_failing_threads.py`.
"""

import re
import time

import pytest

from kv_testing.failing import (
    PATIENT,
    closes,
    in_doubt,
    refused_at_once,
    transport_of,
    wait_for_trouble,
    world,
)
from kv_testing.hangs import planted
from kv_testing.waiting import wait_for
from kv_testing.worlds import fresh_id


@pytest.mark.parametrize("call", ["post", "poll"])
def test_the_senders_agent_fails_with_a_write_under_way(call) -> None:
    """Whether its bytes will land is not known: so no Quiet, and what was granted stays in quarantine."""
    with world(PATIENT) as (p, d, said), planted(transport_of(p), call) as plant:
        transfer = p.offer()
        plant.kill()
        d.order(p, transfer)
        received = d.outcome(others=[p])
        assert not received.ok
        assert re.search(r"thread (has )?failed: Bug\('planted'\)", received.reason), "its receiver is told"
        assert "sends nothing new: the agent's thread has failed" in refused_at_once(d, p)
        wait_for_trouble(p, "the agent's thread has failed")
        assert p.ranks[0].status().gauges["threads_troubled"] == 1
        d.release(p, transfer)
        wait_for(lambda: p.step() == [(0, "p0")], what="the blocks, which nobody reads any more")
        kept = wait_for(lambda: d.ranks[0].status().gauges["quarantined"], what="the quarantine")
        staged = p.ranks[0].status().gauges["staged_bytes"]
        assert staged > 0, "what is written from stays as it is"
        time.sleep(2.0)
        d.step()
        assert d.ranks[0].status().gauges["quarantined"] == kept
        assert not said.quiet & in_doubt(d)
        closes(p, d)


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
    with world() as (p, d, said), planted(transport_of(p), "post") as plant:
        transfer = p.offer()
        plant.hang()
        d.order(p, transfer)
        plant.wait_until_met()
        wait_for_trouble(p, "the agent's thread hangs: it has been in 'post'")
        assert "sends nothing new: the agent's thread hangs" in refused_at_once(d, p)
        received = d.outcome(others=[p])
        assert "deadline" in received.reason
        assert not said.quiet & in_doubt(d)
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
    with world() as (p, d, _), planted(transport_of(d), call) as plant:
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
        wait_for_trouble(d, "the agent's thread hangs")
        assert "nothing can be loaded: the agent's thread hangs" in refused_at_once(d, p)
        closes(d, p)


def test_the_receivers_agent_fails() -> None:
    """A load that is under way needs it no more, and ends well; the next is refused."""
    with world(PATIENT) as (p, d, faults):
        faults.holds_writes = True
        transfer = p.offer()
        d.order(p, transfer)
        wait_for(lambda: faults.num_held, what="a held write")
        with planted(transport_of(d), "blob") as plant:
            plant.kill()
            with pytest.raises(BaseException, match="planted"):
                d.agents[0].card()
        wait_for_trouble(d, "the agent's thread has failed")
        assert "nothing can be loaded: the agent's thread has failed" in refused_at_once(d, p)
        faults.holds_writes = False
        assert d.outcome(others=[p]).ok
        assert not d.misplaced()
        closes(d, p)


def test_the_agent_fails_while_closing() -> None:
    with world() as (p, d, _), planted(transport_of(p), "close") as plant:
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        plant.kill()
        closes(p, d)
        assert plant.num_met == 1
        p.settle(transfer)
        assert p.step() == [(0, "p0")]


def test_after_a_death_nothing_is_freed_while_our_own_agent_does_not_get_on() -> None:
    """What the dead peer had sent may lie in our sockets, and whoever reads them may be held up with our thread."""
    with world() as (p, d, faults), planted(transport_of(d), "poll") as plant:
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
