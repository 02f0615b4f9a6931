"""Limits for calls that a test lets hang, and a look at how long they took.

Law: a limit is short only while something hangs: machines of tests stall, and what works is not given up.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

LIMIT_S = 0.1
PATIENT_S = 60.0
SOON_S = 5.0
"""Far below what anything would take that waits for what hangs."""


class Limited(Protocol):
    """Gives up what takes longer."""

    limit_s: float


@contextmanager
def impatient(one: Limited) -> Iterator[None]:
    """It gives up soon."""
    patient, one.limit_s = one.limit_s, LIMIT_S
    try:
        yield
    finally:
        one.limit_s = patient


class Soon:
    """What is inside ends soon."""

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        assert time.monotonic() - self._began < SOON_S
