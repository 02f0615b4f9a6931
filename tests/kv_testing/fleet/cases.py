"""One fault at one step of one hand-over, in the midst of others.

In:  a Fleet at rest; a Case.
Out: nothing, or LawBroken.
Law: the step is reached, or the case fails. What a fault cannot excuse must work: hand-overs of other engines, those
     whose messages are merely lost or late, those of a peer that stood still for a moment.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kv_testing.fleet.fleet import HASTY, HASTY_S, Fleet, Request, require
from kv_testing.fleet.traps import SCATTER, WRITE, Action, Trap

PREFILL_STEPS: Final = ("InstanceCard", "HelloReply", "Ready", WRITE, "Data", "Quiet", "ReleaseReply")
DECODE_STEPS: Final = ("InstanceHello", "Hello", "Ask", "Grant", SCATTER, "Close", "Release")
INTRODUCTION: Final = ("InstanceCard", "InstanceHello")
"""Said once by each run of a decode engine to each run of a prefill engine."""
REPEATED: Final = ("Grant", "Data", WRITE, SCATTER)
"""Taken once for each chunk."""
LOSSES: Final[tuple[Action, ...]] = ("drop", "double", "late", "corrupt")

MOMENT_S = 0.6
"""How long a process stands still, if it is not for longer than a deadline; peers are probed after half of that."""


@dataclass(frozen=True)
class Case:
    """Who takes part, and what happens to whom."""

    prefill: str
    decode: str
    victim: str
    trap: Trap
    is_long: bool = False
    """Whether a victim that stops stands still until the load's deadline has passed."""

    def __str__(self) -> str:
        trap = self.trap
        what = f"{trap.action}{' for long' if self.is_long else ''}"
        return f"{self.prefill}-{self.decode}: {what} {self.victim} at {trap.step} {trap.nth}+{trap.after_s} s"


def all_cases() -> list[Case]:
    """Every step with every fault, of changing pairs."""
    pairs = itertools.cycle(itertools.product(("p0", "p1"), ("d0", "d1")))
    return [_case(*next(pairs), trap, is_long) for trap, is_long in _traps()]


def _traps() -> Iterator[tuple[Trap, bool]]:
    for step in PREFILL_STEPS + DECODE_STEPS:
        for nth in (1, 5) if step in REPEATED else (1,):
            for after_s in (0.0, 0.003):
                yield Trap(step, "kill", nth, after_s), False
                yield Trap(step, "stop", nth, after_s), False
            yield Trap(step, "stop", nth), True
            yield Trap(step, "abort", nth), False
            if step not in (WRITE, SCATTER):
                for action in LOSSES:
                    yield Trap(step, action, nth), False


def _case(prefill: str, decode: str, trap: Trap, is_long: bool) -> Case:
    decode = HASTY if is_long else decode
    return Case(prefill, decode, prefill if trap.step in PREFILL_STEPS else decode, trap, is_long)


def play(fleet: Fleet, case: Case) -> None:
    """All of it, and the laws after it."""
    if case.trap.step in INTRODUCTION:
        fleet.restart(case.decode)
    others = ("p1" if case.prefill == "p0" else "p0"), ("d1" if case.decode == "d0" else "d0")
    bystanders = [fleet.request(*others) for _ in range(2)]
    fleet.ask(case.victim, "trap", case.trap)
    request = fleet.request_in_danger(case.prefill, case.decode, allowed_s=2 * HASTY_S if case.is_long else MOMENT_S)
    fleet.wait_sprung(case.victim, case.trap)
    _go_on(fleet, case, request)
    for bystander in bystanders:
        ended = fleet.outcome(bystander)
        require(ended.ok, f"{case}: a bystander fails:", ended)
    if case.victim != case.decode or case.trap.action != "kill":
        ended = fleet.outcome(request)
        require(ended.ok or not _must_work(case), f"{case} must not fail the load:", ended)
    fleet.hand_over(case.prefill, case.decode)
    fleet.hand_over(*others)
    fleet.check_at_rest()


def _go_on(fleet: Fleet, case: Case, request: Request) -> None:
    """The victim gets better, or another run takes its place."""
    if case.trap.action == "kill":
        fleet.restart(case.victim)
    elif case.trap.action == "stop":
        if case.is_long and case.victim == case.prefill:
            fleet.outcome(request)
        time.sleep(HASTY_S if case.is_long else MOMENT_S)
        fleet.seats[case.victim].child.resume()


def _must_work(case: Case) -> bool:
    action, step = case.trap.action, case.trap.step
    if action == "corrupt" and step == "InstanceHello":
        # Whoever a door rejects is not to ask again: he speaks another protocol. His load fails with that reason.
        return False
    return action in LOSSES or (action == "stop" and not case.is_long)
