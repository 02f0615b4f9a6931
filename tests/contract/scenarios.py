"""Scenario cases: steps in order on one object, each step's answer observed.

In:  a scenario case.
Out: observations, step by step.
Law: an operation that is not listed is unknown, also when nothing is expected of it. A step that must raise and does is
     the last one on a manager; one that raises against expectation is observed as such and ends the case.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from contract.buffer_driver import BufferDriver
from contract.case import Case, UnknownKind
from contract.functions import HELPERS as FUNCTION_HELPERS
from contract.judge import Observation
from contract.labels import Names
from contract.manager_driver import ManagerDriver
from contract.models import Models
from contract.naive_buffers import HELPERS as BUFFER_HELPERS
from contract.notnow import NotNow
from contract.policy_driver import PolicyDriver
from kv_core.errors import FerryError

Step = dict[str, Any]


HELPERS = FUNCTION_HELPERS | BUFFER_HELPERS
"""What rules may use beside their case's values."""


class Driver(Protocol):
    """What runs the steps of one target. `goes_on` tells whether steps may follow one that had to raise."""

    goes_on: bool

    def call(self, step: Step) -> dict[str, Any]:
        """Run one step; the fields of its answer. UnknownKind for an operation that is not known."""

    def known(self, step: Step) -> dict[str, Any]:
        """What rules may use after this step."""


DRIVERS: dict[str, Callable[[dict[str, Any]], Driver]] = {
    "trans_buffer_manager": BufferDriver,
    "kv_cache_manager": ManagerDriver,
    "eviction_policy": PolicyDriver,
}


def observe(case: Case) -> Iterator[Observation]:
    """Observations of one scenario."""
    config, steps = case.content["config"], case.content["steps"]
    driver: Driver = DRIVERS[config["target"]](config)
    models = Models(config) if config["target"] == "kv_cache_manager" and not case.is_heavy else None
    names = Names()
    for ordinal, step in enumerate(steps):
        known = HELPERS | {"config": config, "step": step, "past": steps[:ordinal]}
        must_raise = bool(step.get("expect_error", False))
        answer, error = _call(driver, step)
        known |= driver.known(step) | (models.after(step) if models else {})
        yield Observation(step["op"], "error", must_raise, error is not None, known, ordinal)
        if error is not None or must_raise:
            if error is not None and must_raise and driver.goes_on:
                continue
            return
        if "expect_blocks" in step:
            yield Observation(step["op"], "blocks", step["expect_blocks"], answer["blocks"], known, ordinal)
        yield from _fields(step, ordinal, _named(answer, names), known, names)


def _call(driver: Driver, step: Step) -> tuple[dict[str, Any], Exception | None]:
    try:
        return driver.call(step), None
    except (FerryError, NotNow) as error:
        return {}, error


def _named(answer: dict[str, Any], names: Names) -> dict[str, Any]:
    return answer | {"events": names.ours(answer["events"])} if "events" in answer else answer


def _fields(
    step: Step, ordinal: int, answer: dict[str, Any], known: dict[str, Any], names: Names
) -> Iterator[Observation]:
    for derived, expect in ((False, step.get("expect")), (True, step.get("expect_derived"))):
        for field, expected in (expect or {}).items():
            if field not in answer:
                raise UnknownKind(f"field {field!r} of operation {step['op']!r}")
            if field == "events":
                expected = names.expected(expected, known.get("seed", {}).get("events", answer["events"]))
            yield Observation(step["op"], field, expected, answer[field], known, ordinal, derived)
