"""A session as two tables: (state, event) -> next state and actions.

One session carries all that one sending rank gives to one receiving rank for one request. This file knows neither
sockets, clocks nor memory: the drivers (`sender.py`, `receiver.py`) turn what happens into events, carry out the
actions in the order given, and then apply the joint rules until none applies.

Two rules, after h11: everything that decides a transition is in this file; and a pair that is not in a table is
illegal, raises IllegalEvent and leaves the state as it was.

Sender                                          Receiver
  NEW ---> PARKED ---> SERVING                    WAITING ---> ASKING ---> MOVING ---> CLOSING ---> ENDED
   |          |           |                          |            |           |                       ^
   |          |           v                          |            v           v                       |
   |          |        STOPPING  blocks are read     |         CANCELLING <---+                       |
   |          |           v                          |            |  late writes possible             |
   |          |        DRAINING  staging is read     +------------+-----------------------------------+
   |          |           v
   +----------+------> ENDED     a tombstone: refuses whatever still comes

Joint rules (`sender_joint`, `receiver_joint`), where the session meets the movements it has started:
  S1  STOPPING, and no gather of it is running or queued   -> READS_OVER   the engine's blocks are free of us
  S2  DRAINING, and no write of it is posted               -> WRITES_OVER  nothing of ours will write any more
  R1  MOVING, and every chunk is scattered                 -> COMPLETE

Laws that the two tables keep together:
  L1  Quiet is said only on entering ENDED or in it, and a session in ENDED never writes.
  L2  A receiver that leaves MOVING before COMPLETE quarantines what it has granted; only Quiet, the Data of that very
      chunk, or the death of the peer gives it back.
  L3  Every state with a wait has an event for its deadline: DEADLINE at the sender; FAIL (the load's deadline) or
      EXPIRED (the sender's own deadline has passed, and it was granted nothing) at the receiver.
      CANCELLING with something in quarantine has none, on purpose: a stopped peer is still a writer.
  L4  A chunk is granted, gathered and written only when its tokens are computed: Ready says how many are, and is said
      again when there are more. Who reads blocks where they lie is told them once all that it asks for is computed.
"""

import enum
from collections.abc import Mapping
from typing import Final, Generic, NamedTuple, TypeVar

State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)
Action = TypeVar("Action", bound=enum.Enum)


class IllegalEvent(Exception):
    """This event has no place in this state; the state is unchanged."""

    def __init__(self, state: enum.Enum, event: enum.Enum) -> None:
        super().__init__(f"{type(state).__name__}.{state.name} has no {event.name}")
        self.state = state
        self.event = event


class Step(NamedTuple, Generic[State, Action]):
    """What an event leads to."""

    state: State
    actions: tuple[Action, ...]


Table = Mapping[State, Mapping[Event, Step[State, Action]]]


def step(table: Table[State, Event, Action], state: State, event: Event) -> Step[State, Action]:
    """Where `event` leads from `state`; raises IllegalEvent."""
    found = table[state].get(event)
    if found is None:
        raise IllegalEvent(state, event)
    return found


# -- sender ----------------------------------------------------------------------------------------------------------


class Sending(enum.Enum):
    """States of a session at the sender."""

    NEW = enum.auto()
    PARKED = enum.auto()
    SERVING = enum.auto()
    STOPPING = enum.auto()
    DRAINING = enum.auto()
    ENDED = enum.auto()


class SendEvent(enum.Enum):
    """What may happen to a session at the sender."""

    PARK = enum.auto()  # asked, and no such offer yet
    OPEN = enum.auto()  # asked or parked, and the offer is here
    TURN_AWAY = enum.auto()  # asked or parked, and it cannot be served, now or ever
    ASK = enum.auto()  # Ask again, for a session that we know
    ADVANCED = enum.auto()  # more of the offer's prompt is computed
    GRANT = enum.auto()  # Grant of a chunk not begun
    GRANT_AGAIN = enum.auto()  # Grant of a chunk whose Data was sent
    WRITTEN = enum.auto()  # the agent reports a chunk done
    FAIL = enum.auto()  # a gather or a write went wrong, or the offer was withdrawn
    CLOSE = enum.auto()
    CANCEL = enum.auto()
    DEADLINE = enum.auto()
    PEER_DEAD = enum.auto()
    READS_OVER = enum.auto()  # joint rule S1
    WRITES_OVER = enum.auto()  # joint rule S2


class SendAction(enum.Enum):
    """What the sender's driver has to do."""

    HOLD_OFFER = enum.auto()
    FREE_OFFER = enum.auto()
    QUEUE_CHUNK = enum.auto()
    DROP_CHUNKS = enum.auto()  # those not begun, and those the agent can still withdraw
    SAY_READY = enum.auto()
    SAY_REFUSE = enum.auto()
    SAY_DATA = enum.auto()
    SAY_QUIET = enum.auto()


_S, _E, _A = Sending, SendEvent, SendAction


def _to(state: State, *actions: Action) -> Step[State, Action]:
    return Step(state, actions)


SENDER: Final[Table[Sending, SendEvent, SendAction]] = {
    _S.NEW: {
        _E.PARK: _to(_S.PARKED),
        _E.OPEN: _to(_S.SERVING, _A.HOLD_OFFER, _A.SAY_READY),
        _E.TURN_AWAY: _to(_S.ENDED, _A.SAY_REFUSE),
        # Never heard of: from here on it never will be.
        _E.GRANT: _to(_S.ENDED, _A.SAY_QUIET),
        _E.CLOSE: _to(_S.ENDED, _A.SAY_QUIET),
        _E.CANCEL: _to(_S.ENDED, _A.SAY_QUIET),
    },
    _S.PARKED: {
        _E.OPEN: _to(_S.SERVING, _A.HOLD_OFFER, _A.SAY_READY),
        _E.TURN_AWAY: _to(_S.ENDED, _A.SAY_REFUSE),
        _E.ASK: _to(_S.PARKED),
        _E.CLOSE: _to(_S.ENDED, _A.SAY_QUIET),
        _E.CANCEL: _to(_S.ENDED, _A.SAY_QUIET),
        _E.DEADLINE: _to(_S.ENDED, _A.SAY_REFUSE),
        _E.PEER_DEAD: _to(_S.ENDED),
    },
    _S.SERVING: {
        _E.ASK: _to(_S.SERVING, _A.SAY_READY),
        _E.ADVANCED: _to(_S.SERVING, _A.SAY_READY),
        _E.GRANT: _to(_S.SERVING, _A.QUEUE_CHUNK),
        _E.GRANT_AGAIN: _to(_S.SERVING, _A.SAY_DATA),
        _E.WRITTEN: _to(_S.SERVING, _A.SAY_DATA),
        _E.FAIL: _to(_S.STOPPING, _A.DROP_CHUNKS, _A.SAY_REFUSE),
        _E.CLOSE: _to(_S.STOPPING, _A.DROP_CHUNKS),
        _E.CANCEL: _to(_S.STOPPING, _A.DROP_CHUNKS),
        _E.DEADLINE: _to(_S.STOPPING, _A.DROP_CHUNKS, _A.SAY_REFUSE),
        _E.PEER_DEAD: _to(_S.STOPPING, _A.DROP_CHUNKS),
    },
    _S.STOPPING: {
        _E.ASK: _to(_S.STOPPING, _A.SAY_REFUSE),
        _E.GRANT: _to(_S.STOPPING),
        _E.GRANT_AGAIN: _to(_S.STOPPING, _A.SAY_DATA),
        _E.WRITTEN: _to(_S.STOPPING, _A.SAY_DATA),
        _E.FAIL: _to(_S.STOPPING),
        _E.CLOSE: _to(_S.STOPPING),
        _E.CANCEL: _to(_S.STOPPING),
        _E.DEADLINE: _to(_S.STOPPING),
        _E.PEER_DEAD: _to(_S.STOPPING),
        _E.READS_OVER: _to(_S.DRAINING, _A.FREE_OFFER),
    },
    _S.DRAINING: {
        _E.ASK: _to(_S.DRAINING, _A.SAY_REFUSE),
        _E.GRANT: _to(_S.DRAINING),
        _E.GRANT_AGAIN: _to(_S.DRAINING, _A.SAY_DATA),
        _E.WRITTEN: _to(_S.DRAINING, _A.SAY_DATA),
        _E.FAIL: _to(_S.DRAINING),
        _E.CLOSE: _to(_S.DRAINING),
        _E.CANCEL: _to(_S.DRAINING),
        _E.DEADLINE: _to(_S.DRAINING),
        _E.PEER_DEAD: _to(_S.DRAINING),
        _E.WRITES_OVER: _to(_S.ENDED, _A.SAY_QUIET),
    },
    _S.ENDED: {
        _E.ASK: _to(_S.ENDED, _A.SAY_REFUSE, _A.SAY_QUIET),
        _E.GRANT: _to(_S.ENDED, _A.SAY_QUIET),
        _E.CLOSE: _to(_S.ENDED, _A.SAY_QUIET),
        _E.CANCEL: _to(_S.ENDED, _A.SAY_QUIET),
    },
}


def sender_joint(state: Sending, num_reads: int, num_writes: int) -> SendEvent | None:
    """The event that the session's own movements raise now: rules S1 and S2."""
    if state is Sending.STOPPING and num_reads == 0:
        return SendEvent.READS_OVER
    if state is Sending.DRAINING and num_writes == 0:
        return SendEvent.WRITES_OVER
    return None


# -- receiver --------------------------------------------------------------------------------------------------------


class Receiving(enum.Enum):
    """States of a session at the receiver."""

    WAITING = enum.auto()  # for the introduction to the peer
    ASKING = enum.auto()
    MOVING = enum.auto()
    CLOSING = enum.auto()
    CANCELLING = enum.auto()
    ENDED = enum.auto()


class ReceiveEvent(enum.Enum):
    """What may happen to a session at the receiver."""

    INTRODUCED = enum.auto()  # Hello was answered, for the first time or again
    READY = enum.auto()
    REFUSE = enum.auto()
    DATA = enum.auto()  # of a chunk that is granted and not yet accounted for
    QUIET = enum.auto()
    NUDGE = enum.auto()  # nothing was heard for a while
    FAIL = enum.auto()  # the load has failed: deadline, abort, another session, bad bytes
    EXPIRED = enum.auto()  # the sender's deadline has passed too, and nothing is in quarantine
    PEER_DEAD = enum.auto()
    COMPLETE = enum.auto()  # joint rule R1


class ReceiveAction(enum.Enum):
    """What the receiver's driver has to do."""

    SAY_ASK = enum.auto()
    ASK_PROGRESS = enum.auto()  # SAY_ASK, if the prompt was not computed to its end when we heard of it last
    SAY_GRANTS = enum.auto()  # again, those unanswered
    SAY_CLOSE = enum.auto()
    SAY_CANCEL = enum.auto()
    GRANT = enum.auto()  # may take staging memory from now on, or read: as far as it is computed
    TAKE_CHUNK = enum.auto()  # verify and scatter
    QUARANTINE = enum.auto()  # all that is granted and not accounted for
    FREE_CHUNK = enum.auto()  # this chunk's region is quiet
    FREE_ALL = enum.auto()  # every region of this session is quiet
    FAIL_LOAD = enum.auto()


_R, _V, _B = Receiving, ReceiveEvent, ReceiveAction

RECEIVER: Final[Table[Receiving, ReceiveEvent, ReceiveAction]] = {
    _R.WAITING: {
        _V.INTRODUCED: _to(_R.ASKING, _B.SAY_ASK),
        _V.NUDGE: _to(_R.WAITING),
        _V.FAIL: _to(_R.ENDED),
        _V.PEER_DEAD: _to(_R.ENDED, _B.FAIL_LOAD),
    },
    _R.ASKING: {
        _V.INTRODUCED: _to(_R.ASKING, _B.SAY_ASK),
        _V.READY: _to(_R.MOVING, _B.GRANT),
        # Read from the peer's book, before it was heard.
        _V.COMPLETE: _to(_R.CLOSING, _B.SAY_CLOSE),
        _V.REFUSE: _to(_R.ENDED, _B.FAIL_LOAD),
        _V.QUIET: _to(_R.ENDED, _B.FAIL_LOAD),
        _V.NUDGE: _to(_R.ASKING, _B.SAY_ASK),
        _V.FAIL: _to(_R.CANCELLING, _B.SAY_CANCEL),
        _V.PEER_DEAD: _to(_R.ENDED, _B.FAIL_LOAD),
    },
    _R.MOVING: {
        _V.INTRODUCED: _to(_R.MOVING, _B.SAY_GRANTS, _B.ASK_PROGRESS),
        _V.READY: _to(_R.MOVING, _B.GRANT),
        _V.REFUSE: _to(_R.CANCELLING, _B.QUARANTINE, _B.SAY_CANCEL, _B.FAIL_LOAD),
        _V.DATA: _to(_R.MOVING, _B.TAKE_CHUNK),
        _V.QUIET: _to(_R.ENDED, _B.FREE_ALL, _B.FAIL_LOAD),
        _V.NUDGE: _to(_R.MOVING, _B.SAY_GRANTS, _B.ASK_PROGRESS),
        _V.FAIL: _to(_R.CANCELLING, _B.QUARANTINE, _B.SAY_CANCEL),
        _V.PEER_DEAD: _to(_R.ENDED, _B.QUARANTINE, _B.FAIL_LOAD),
        _V.COMPLETE: _to(_R.CLOSING, _B.SAY_CLOSE),
    },
    _R.CLOSING: {
        _V.INTRODUCED: _to(_R.CLOSING, _B.SAY_CLOSE),
        _V.READY: _to(_R.CLOSING),
        _V.REFUSE: _to(_R.CLOSING),
        _V.QUIET: _to(_R.ENDED),
        _V.NUDGE: _to(_R.CLOSING, _B.SAY_CLOSE),
        _V.FAIL: _to(_R.CLOSING),
        _V.EXPIRED: _to(_R.ENDED),
        _V.PEER_DEAD: _to(_R.ENDED),
    },
    _R.CANCELLING: {
        _V.INTRODUCED: _to(_R.CANCELLING, _B.SAY_CANCEL),
        _V.READY: _to(_R.CANCELLING),
        _V.REFUSE: _to(_R.CANCELLING),
        _V.DATA: _to(_R.CANCELLING, _B.FREE_CHUNK),
        _V.QUIET: _to(_R.ENDED, _B.FREE_ALL),
        _V.NUDGE: _to(_R.CANCELLING, _B.SAY_CANCEL),
        _V.FAIL: _to(_R.CANCELLING),
        _V.EXPIRED: _to(_R.ENDED),
        _V.PEER_DEAD: _to(_R.ENDED),
    },
    _R.ENDED: {
        _V.FAIL: _to(_R.ENDED),
    },
}


def receiver_joint(state: Receiving, num_unscattered: int) -> ReceiveEvent | None:
    """The event that the session's own movements raise now: rule R1."""
    if state in (Receiving.ASKING, Receiving.MOVING) and num_unscattered == 0:
        return ReceiveEvent.COMPLETE
    return None
