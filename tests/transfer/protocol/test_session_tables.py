"""The two tables of a session: every pair, the laws between them, and their joint rules."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.protocol.session import (
    RECEIVER,
    SENDER,
    IllegalEvent,
    ReceiveAction,
    ReceiveEvent,
    Receiving,
    SendAction,
    SendEvent,
    Sending,
    receiver_joint,
    sender_joint,
    step,
)

TABLES = [(SENDER, Sending, SendEvent, SendAction), (RECEIVER, Receiving, ReceiveEvent, ReceiveAction)]
PAIRS = [
    pytest.param(table, state, event, id=f"{states.__name__}-{state.name}-{event.name}")
    for table, states, events, _ in TABLES
    for state, event in itertools.product(states, events)
]


@pytest.mark.parametrize(("table", "state", "event"), PAIRS)
def test_every_pair_is_either_in_the_table_or_refused(table, state, event):
    """`step` is a function of values: an illegal pair raises, names both, and has nothing to leave changed."""
    before = {key: dict(row) for key, row in table.items()}
    if event in table[state]:
        following, actions = step(table, state, event)
        assert isinstance(following, type(state))
        assert isinstance(actions, tuple)
    else:
        with pytest.raises(IllegalEvent, match=f"{state.name} has no {event.name}") as caught:
            step(table, state, event)
        assert (caught.value.state, caught.value.event) == (state, event)
    assert before == {key: dict(row) for key, row in table.items()}


@pytest.mark.parametrize(("table", "states", "events", "actions"), TABLES, ids=["sender", "receiver"])
def test_nothing_is_unreachable_or_unused(table, states, events, actions):
    assert set(table) == set(states)
    reached = {following for row in table.values() for following, _ in row.values()}
    assert reached | {next(iter(states))} == set(states)
    assert {event for row in table.values() for event in row} == set(events)
    assert {action for row in table.values() for _, does in row.values() for action in does} == set(actions)


@pytest.mark.parametrize(("table", "states", "events", "actions"), TABLES, ids=["sender", "receiver"])
def test_every_state_leads_to_the_end(table, states, events, actions):
    ended = {states["ENDED"]}
    while more := {s for s in states if any(step.state in ended for step in table[s].values())} - ended:
        ended |= more
    assert ended == set(states)


@pytest.mark.parametrize(("table", "states", "events", "actions"), TABLES, ids=["sender", "receiver"])
def test_an_ended_session_stays_ended(table, states, events, actions):
    assert {following for following, _ in table[states["ENDED"]].values()} == {states["ENDED"]}


def test_quiet_is_said_only_when_nothing_can_be_written_any_more():
    """Law L1."""
    for state, row in SENDER.items():
        for event, (following, actions) in row.items():
            if SendAction.SAY_QUIET in actions:
                assert following is Sending.ENDED, (state, event)
                assert state in (Sending.NEW, Sending.PARKED, Sending.DRAINING, Sending.ENDED), (state, event)


def test_a_chunk_is_begun_only_while_serving():
    begins = {state for state, row in SENDER.items() for _, acts in row.values() if SendAction.QUEUE_CHUNK in acts}
    assert begins == {Sending.SERVING}


def test_leaving_moving_early_doubts_what_is_granted():
    """Law L2: every way out of MOVING but COMPLETE and QUIET quarantines."""
    for event, (following, actions) in RECEIVER[Receiving.MOVING].items():
        if following is not Receiving.MOVING and event not in (ReceiveEvent.COMPLETE, ReceiveEvent.QUIET):
            assert ReceiveAction.QUARANTINE in actions, event


def test_only_the_peer_can_free_what_is_in_doubt():
    frees = {
        event
        for row in RECEIVER.values()
        for event, (_, actions) in row.items()
        if ReceiveAction.FREE_ALL in actions or ReceiveAction.FREE_CHUNK in actions
    }
    assert frees == {ReceiveEvent.DATA, ReceiveEvent.QUIET}


def test_every_wait_has_a_deadline():
    """Law L3."""
    for state in (Sending.PARKED, Sending.SERVING, Sending.STOPPING, Sending.DRAINING):
        assert SendEvent.DEADLINE in SENDER[state]
    for waits in (Receiving.WAITING, Receiving.ASKING, Receiving.MOVING):
        assert ReceiveEvent.FAIL in RECEIVER[waits]
    for ends in (Receiving.CLOSING, Receiving.CANCELLING):
        assert ReceiveEvent.EXPIRED in RECEIVER[ends]
    for lives in set(Receiving) - {Receiving.ENDED}:
        assert ReceiveEvent.PEER_DEAD in RECEIVER[lives]


def test_whatever_a_peer_repeats_is_taken():
    """Messages may come twice or late: wherever the first copy may have led, the second is taken too."""
    for state in (Sending.PARKED, Sending.SERVING, Sending.STOPPING, Sending.DRAINING, Sending.ENDED):
        for event in (SendEvent.ASK, SendEvent.CLOSE, SendEvent.CANCEL):
            assert event in SENDER[state], (state, event)
    for there in (Receiving.MOVING, Receiving.CLOSING, Receiving.CANCELLING):
        for late in (ReceiveEvent.READY, ReceiveEvent.REFUSE, ReceiveEvent.QUIET):
            assert late in RECEIVER[there], (there, late)


def test_joint_rules_hold_only_with_nothing_under_way():
    for state, reads, writes in itertools.product(Sending, (0, 1), (0, 1)):
        expected = None
        if state is Sending.STOPPING and not reads:
            expected = SendEvent.READS_OVER
        if state is Sending.DRAINING and not writes:
            expected = SendEvent.WRITES_OVER
        assert sender_joint(state, reads, writes) is expected
    for there, left in itertools.product(Receiving, (0, 1)):
        complete = ReceiveEvent.COMPLETE if there in (Receiving.ASKING, Receiving.MOVING) and not left else None
        assert receiver_joint(there, left) is complete


@given(st.lists(st.sampled_from(SendEvent), max_size=30))
def test_an_offer_is_held_and_freed_in_pairs(events):
    """Whatever happens to a sender, in any order: the offer is held at most once, and freed exactly then."""
    state, held = Sending.NEW, 0
    for event in events:
        try:
            state, actions = step(SENDER, state, event)
        except IllegalEvent:
            continue
        held += actions.count(SendAction.HOLD_OFFER) - actions.count(SendAction.FREE_OFFER)
        assert held == (state in (Sending.SERVING, Sending.STOPPING)), state
