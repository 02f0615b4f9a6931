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
from typing import Final, Literal

from kv_testing.fleet.fleet import HASTY, HASTY_S, Fleet, Request, require
from kv_testing.fleet.traps import LATE_S, SCATTER, WRITE, Action, Trap

PREFILL_STEPS: Final = ("InstanceCard", "HelloReply", "Ready", WRITE, "Data", "Quiet", "ReleaseReply")
DECODE_STEPS: Final = ("InstanceHello", "Hello", "Ask", "Grant", SCATTER, "Close", "Release")
INTRODUCTION: Final = ("InstanceCard", "InstanceHello")
"""Said once by each run of a decode engine to each run of a prefill engine."""
REPEATED: Final = ("Grant", "Data", WRITE, SCATTER)
"""Taken once for each chunk."""
VERY_LATE: Final = ("Ask", "Ready", "Grant", "Data", "Close", "Quiet")
"""Of these one also comes long after all is over."""
LOSSES: Final[tuple[Action, ...]] = ("drop", "double", "late", "corrupt")

JUST_AFTER_S, VERY_LATE_S = 0.003, 10.0
MOMENT_S = 0.6
"""How long a process stands still, if it is not for longer than a deadline; peers are probed after half of that."""


Until = Literal["a moment later", "the deadline has passed", "it is killed"]


@dataclass(frozen=True)
class Case:
    """Who takes part, and what happens to whom."""

    prefill: str
    decode: str
    victim: str
    trap: Trap
    until: Until = "a moment later"
    """When a victim that stops goes on, or dies."""

    def __str__(self) -> str:
        trap = self.trap
        what = trap.action + (f" (until {self.until})" if trap.action == "stop" else "")
        return f"{self.prefill}-{self.decode}: {what} {self.victim} at {trap.step} {trap.nth}+{trap.after_s} s"


def all_cases() -> list[Case]:
    """Every step with every fault, of changing pairs."""
    pairs = itertools.cycle(itertools.product(("p0", "p1"), ("d0", "d1")))
    return [_case(*next(pairs), *each) for each in _traps()]


def _traps() -> Iterator[tuple[Trap, Until]]:
    for step in PREFILL_STEPS + DECODE_STEPS:
        for nth in (1, 5) if step in REPEATED else (1,):
            for after_s in (0.0, JUST_AFTER_S):
                yield Trap(step, "kill", nth, after_s), "a moment later"
                yield Trap(step, "stop", nth, after_s), "a moment later"
            yield Trap(step, "stop", nth), "the deadline has passed"
            yield Trap(step, "stop", nth), "it is killed"
            yield Trap(step, "abort", nth), "a moment later"
            yield Trap(step, "close", nth), "a moment later"
            if step not in (WRITE, SCATTER):
                for action in LOSSES:
                    yield Trap(step, action, nth, LATE_S if action == "late" else 0.0), "a moment later"
        if step in VERY_LATE:
            yield Trap(step, "late", after_s=VERY_LATE_S), "a moment later"


def _case(prefill: str, decode: str, trap: Trap, until: Until) -> Case:
    decode = HASTY if until == "the deadline has passed" else decode
    return Case(prefill, decode, prefill if trap.step in PREFILL_STEPS else decode, trap, until)


def play(fleet: Fleet, case: Case) -> None:
    """All of it, and the laws after it."""
    if case.trap.step in INTRODUCTION:
        fleet.restart(case.decode)
    others = ("p1" if case.prefill == "p0" else "p0"), ("d1" if case.decode == "d0" else "d0")
    bystanders = [fleet.request(*others) for _ in range(2)]
    fleet.ask(case.victim, "trap", case.trap)
    request = fleet.request_in_danger(case.prefill, case.decode, allowed_s=2 * _pause_s(case))
    fleet.wait_sprung(case.victim, case.trap)
    _go_on(fleet, case, request)
    for bystander in bystanders:
        ended = fleet.outcome(bystander)
        require(ended.ok, f"{case}: a bystander fails:", ended)
    if case.victim != case.decode or not _ends(case):
        ended = fleet.outcome(request)
        require(ended.ok or not _must_work(case), f"{case} must not fail the load:", ended)
    fleet.hand_over(case.prefill, case.decode)
    fleet.hand_over(*others)
    if case.trap.after_s == VERY_LATE_S:
        time.sleep(VERY_LATE_S)
    fleet.check_at_rest()


def _go_on(fleet: Fleet, case: Case, request: Request) -> None:
    """The victim gets better, or another run takes its place."""
    if case.trap.action in ("kill", "close"):
        fleet.restart(case.victim)
    elif case.trap.action == "stop":
        if case.until == "the deadline has passed" and case.victim == case.prefill:
            fleet.outcome(request)
        time.sleep(_pause_s(case))
        if case.until == "it is killed":
            fleet.restart(case.victim)
        else:
            fleet.seats[case.victim].child.resume()


def _pause_s(case: Case) -> float:
    return HASTY_S if case.until == "the deadline has passed" else MOMENT_S


def _ends(case: Case) -> bool:
    return case.trap.action in ("kill", "close") or case.until == "it is killed"


def _must_work(case: Case) -> bool:
    action, step = case.trap.action, case.trap.step
    if action == "corrupt" and step == "InstanceHello":
        # Whoever a door rejects is not to ask again: he speaks another protocol. His load fails with that reason.
        return False
    return action in LOSSES or (action == "stop" and case.until == "a moment later")
