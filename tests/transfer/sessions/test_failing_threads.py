"""One of our threads fails, or hangs in a call: what it was doing ends in a reported failure, and nothing lies.

The table of docs/decisions/0005-threads-that-fail.md, row by row, over real threads; those of the agent are in
`test_failing_agents.py`. Laws of every row: each order is
reported once, by its deadline unless a copy is at work in its very blocks; what is new is refused at once, with the
reason; Quiet is not said for what may still be written; closing does not wait.
"""

import time

import pytest

from kv_testing.failing import (
    PATIENT,
    QUICK,
    STALL_S,
    closes,
    refused_at_once,
    summer_of,
    wait_for_trouble,
    world,
)
from kv_testing.hangs import Plant, planted
from kv_testing.waiting import wait_for
from kv_testing.worlds import Side, pair

# -- the copy thread -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["p", "d"])
def test_the_copy_thread_fails(who) -> None:
    """Every copy ends badly, the one that runs, those that wait and those to come."""
    with world(PATIENT) as (p, d, _):
        side = {"p": p, "d": d}[who]
        with planted(summer_of(side), "checksum") as plant:
            transfer = p.offer()
            plant.kill()
            d.order(p, transfer)
            assert "the copy thread has failed: Bug('planted')" in d.outcome(others=[p]).reason
            assert "the copy thread has failed" in refused_at_once(d, p)
            wait_for_trouble(side, "the copy thread has failed")
            d.release(p, transfer)
            for each in (p, d):
                each.check_clean()
            assert p.sent == [(0, "p0")]
            closes(p, d)


def test_the_receivers_copy_thread_hangs_in_one_order_and_keeps_nobody_elses_blocks() -> None:
    with world() as (p, d, _), planted(summer_of(d), "checksum") as plant:
        transfers = [p.offer(f"p{number}") for number in range(2)]
        plant.hang()
        d.order(p, transfers[0], "inside")
        plant.wait_until_met()
        d.order(p, transfers[1], "behind")
        assert "deadline" in d.outcome("behind", others=[p]).reason, "queued behind it: taken back"
        assert "nothing can be loaded: the copy thread hangs: it has been in 'copy'" in refused_at_once(d, p)
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
    with world() as (p, d, _), planted(summer_of(p), "checksum") as plant:
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
        with planted(summer_of(side), "checksum") as plant:
            plant.hang()
            transfer = p.offer()
            d.order(p, transfer)
            plant.wait_until_met()
            closes(side)
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
            wait_for_trouble(d, "the reactor hangs: it has been in 'turn'")
            assert "the reactor hangs" in refused_at_once(d, p)
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
            wait_for_trouble(p, "the reactor hangs")
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
    with world() as (p, d, _), planted(summer_of(d), "checksum") as plant:
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
