"""A stopped instance keeps its share of staging, and no more: transfers with others go on."""

import logging
from contextlib import contextmanager
from dataclasses import replace
from threading import Event

import pytest

from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, SOON_S, Switches, hang_until, make_side, sides, state_of
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.staging import Arena
from kv_transfer.turns import Turn, Turns

NUM_REGIONS = 16
SMALL = replace(FAST, send_arena_bytes=NUM_REGIONS * 4096, receive_arena_bytes=NUM_REGIONS * 4096)
NUM_LOADS = 8
"""With four chunks in flight each: twice of what an arena has."""


@contextmanager
def _stopped_sender(config, num_granted=NUM_REGIONS // 2):
    """A receiver with many loads from a sender that is stopped once it has so many regions; and a healthy sender."""
    hub, faults, go_on = LoopbackHub(), Switches(holds_writes=True), Event()
    stopped = make_side(hub, "stopped", state_of(), faults=faults)
    with sides(stopped, make_side(hub, "healthy", state_of()), make_side(hub, "d", state_of(), config)) as (_, p, d):
        try:
            for number in range(NUM_LOADS):
                d.order(stopped, stopped.offer(f"s{number}"), f"lost{number}")
            wait_for(lambda: d.receive_arena().num_leases >= num_granted, what="granted regions")
            stopped.ranks[0]._reactor.post(lambda: hang_until(go_on))
            yield p, d
        finally:
            faults.holds_writes = False
            go_on.set()


def test_a_stopped_sender_keeps_half_of_the_receivers_staging(caplog):
    with _stopped_sender(replace(SMALL, request_deadline_s=8.0)) as (p, d):
        assert d.receive_arena().num_leases == NUM_REGIONS // 2
        d.order(p, p.offer(), "d0")
        assert d.outcome("d0", timeout_s=SOON_S, others=[p]).ok
        with caplog.at_level(logging.ERROR):
            for number in range(NUM_LOADS):
                assert not d.outcome(f"lost{number}", others=[p]).ok
            wait_for(lambda: "receive arena wait for peers" in caplog.text, what="the alarm")
        assert "stopped (stopped-" in caplog.text
        assert f": {NUM_REGIONS // 2 * 4096} bytes" in caplog.text
        assert d.receive_arena().num_quarantined == NUM_REGIONS // 2
        d.order(p, p.offer("p1"), "d1")
        assert d.outcome("d1", timeout_s=SOON_S, others=[p]).ok


def test_control_without_shares_it_keeps_all(monkeypatch):
    monkeypatch.setattr(Arena, "has_share", lambda arena, num_bytes, owner: True)
    with _stopped_sender(replace(SMALL, request_deadline_s=2.0), NUM_REGIONS) as (p, d):
        d.order(p, p.offer(), "d0")
        assert "deadline" in d.outcome("d0", others=[p]).reason


def test_a_stopped_receiver_keeps_half_of_the_senders_staging(monkeypatch):
    hub, held = LoopbackHub(), set()
    faults = Switches()
    monkeypatch.setattr(faults, "before_write", lambda session, seq: session in held)
    p = make_side(hub, "p", state_of(), SMALL, faults)
    with sides(p, make_side(hub, "slow", state_of()), make_side(hub, "healthy", state_of())) as (_, slow, d):
        receiver = slow.cores[0].loads.receiver
        open_session = receiver.open

        def opened(*args):
            session = open_session(*args)
            held.add(session.name)
            return session

        monkeypatch.setattr(receiver, "open", opened)
        for number in range(NUM_LOADS):
            slow.order(p, p.offer(f"s{number}"), f"slow{number}")
        wait_for(lambda: p.arenas[0].num_leases >= NUM_REGIONS // 2, what="chunks for the slow one")
        d.order(p, p.offer(), "d0")
        assert d.outcome("d0", timeout_s=SOON_S, others=[p]).ok
        assert p.arenas[0].num_leases == NUM_REGIONS // 2
        held.clear()
        for number in range(NUM_LOADS):
            assert slow.outcome(f"slow{number}", others=[p]).ok


@pytest.mark.parametrize(
    ("answers", "served"),
    [
        ({"a": [Turn.SERVED, Turn.OVER], "b": [Turn.SERVED, Turn.OVER]}, "abab"),
        ({"a": [Turn.NO_ROOM], "b": []}, "a"),
        ({"a": [Turn.HAS_SHARE] * 9, "b": [Turn.SERVED, Turn.OVER]}, "abab"),
        ({"a": [Turn.HAS_SHARE] * 9, "b": [Turn.NO_ROOM]}, "ab"),
    ],
)
def test_who_has_its_share_is_passed_over(answers, served):
    asked = []

    def serve(who):
        asked.append(who)
        return answers[who].pop(0)

    turns = Turns(serve)
    turns.join("a")
    turns.join("b")
    turns.join("a")
    turns.pump()
    assert "".join(asked) == served
