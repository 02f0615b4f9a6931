"""Two sides of which a thread is made to fail or hang, and what is asked of them then.

In:  settings; a side, and what is the matter with it.
Out: sides that notice soon; what is refused, what is in doubt.
Law: whoever waits here waits for what is seen from outside: a status, an outcome, an end.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kv_core.ids import SessionId
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, SOON_S, Side, Switches, fresh_id, make_side, sides
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


def in_doubt(side: Side) -> set[SessionId]:
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


def transport_of(side: Side) -> Any:
    agent: Any = side.agents[0]
    return agent._transport


def summer_of(side: Side):
    """Called by the copy thread in each gather and each scatter."""
    return side.cores[0].sender.passages._copier._summer


def refused_at_once(d: Side, p: Side, request_id: str = "new") -> str:
    """Why the next order fails: not by its deadline, if that is the reason which is expected."""
    d.order(p, fresh_id(), request_id)
    return d.outcome(request_id, others=[p]).reason


def wait_for_trouble(side: Side, what: str) -> None:
    """Until just this is the matter: a reactor may have waited for the thread, and is seen to go on a moment later."""

    def is_seen() -> bool:
        said = side.ranks[0].status().trouble.split("; ")
        return len(said) == 1 and what in said[0]

    wait_for(is_seen, what=f"the trouble to be seen: {what}")


def closes(*those: Side) -> None:
    began = time.monotonic()
    for side in those:
        side.ranks[0].close(1.0)
    assert time.monotonic() - began < SOON_S
