"""Waiting in tests: for a condition, with a deadline that says what was waited for."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], timeout_s: float = 20.0, what: str = "a condition") -> T:
    """The first true answer of `condition`; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.001)
    return answer
