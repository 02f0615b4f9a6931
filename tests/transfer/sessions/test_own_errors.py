"""One error of our own ends no clockwork: the next round comes, and does what this one did not."""

import socket
from dataclasses import replace

import pytest

from kv_core.ids import TransferId
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, PROMPT, Switches, fresh_id, make_side, pair, sides, state_of
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.orders import Errand


class Once:
    """Stands in front of a call, and raises in its place the first time."""

    def __init__(self, call):
        self.call = call
        self.num_calls = 0

    def __call__(self, *args, **named):
        self.num_calls += 1
        if self.num_calls == 1:
            raise RuntimeError("planted")
        return self.call(*args, **named)


@pytest.fixture
def mute_port():
    """A port where somebody listens, who never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def _num_loaded(side):
    side.step()
    return sum(each.ok for _, each in side.received)


def _plant(owner, name):
    planted = Once(getattr(owner, name))
    setattr(owner, name, planted)
    return planted


def test_the_watch_over_peers_goes_on():
    with pair(config=replace(FAST, peer_idle_s=0.3)) as (p, d, _):
        planted = _plant(d.cores[0].peers, "_forget")
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        wait_for(lambda: planted.num_calls > 1, what="the next round")
        wait_for(lambda: not d.ranks[0].status().gauges["peers"], what="to be forgotten")
        assert d.count("internal_errors") == 1
        d.release(p, transfer)


def test_leases_go_on_ending():
    with sides(make_side(LoopbackHub(), "p", state_of())) as (p,):
        planted = _plant(p.door._porter._leases, "expire")
        p.offer(lease_s=0.1)
        p.check_clean()
        assert planted.num_calls > 1


def test_releases_go_on_being_said(mute_port):
    with sides(make_side(LoopbackHub(), "d", state_of(), replace(FAST, release_deadline_s=1.0))) as (d,):
        releaser = d.door._porter.releaser
        planted = _plant(releaser, "_give_up")
        d.door.release(Errand("127.0.0.1", mute_port, TransferId(fresh_id()), PROMPT, "d/0"))
        wait_for(lambda: d.door.status().counters.get("releases_given_up"), what="the end of the release")
        assert planted.num_calls > 1


def test_nothing_is_held_that_is_being_released(mute_port):
    """Its release is said already, so that no other would end the hold."""
    with sides(make_side(LoopbackHub(), "d", state_of(), replace(FAST, release_deadline_s=30.0))) as (d,):
        errand = "127.0.0.1", mute_port, TransferId(fresh_id()), PROMPT, "d/0"
        d.door.hold(Errand(*errand))
        wait_for(lambda: d.door.status().gauges["holds"] == 1, what="the hold")
        d.door.release(Errand(*errand))
        d.door.hold(Errand(*errand))
        d.door.hold(Errand(*errand[:4], "d/1"))
        wait_for(lambda: d.door._porter.releaser.num_holds and d.door.status().gauges["releases"], what="both")
        (errands,) = d.door._porter.releaser._doors.values()
        wait_for(lambda: any(key[2] == "d/1" for key in errands.held), what="the last call")
        assert [key[2] for key in errands.held] == ["d/1"]


def test_questions_for_a_card_go_on_being_asked(mute_port):
    with sides(make_side(LoopbackHub(), "d", state_of(), replace(FAST, request_deadline_s=1.0))) as (d,):
        wire = d.ranks[0]._reactor.wire
        planted = _plant(wire, "send")
        d.ranks[0].receive(d.make_order("127.0.0.1", mute_port, fresh_id()))
        assert "deadline" in d.outcome().reason
        assert planted.num_calls > 2


def test_an_error_with_one_completion_does_not_cost_the_others():
    faults = Switches(holds_writes=True)
    with pair(prefill_faults=faults) as (p, d, _):
        planted = _plant(p.cores[0].sender.passages, "completed")
        transfers = [p.offer(f"p{number}") for number in range(2)]
        d.order(p, transfers[0], "d0")
        d.order(p, transfers[1], "d1")
        wait_for(lambda: faults.num_held > 4, what="held writes")
        faults.holds_writes = False
        # The load whose completion was lost stays open; the other does not.
        wait_for(lambda: _num_loaded(d), what="the other load")
        assert planted.num_calls > 4
        assert p.count("internal_errors") == 1
        d.abort("d0")
        d.abort("d1")
