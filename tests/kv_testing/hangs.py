"""Threads of ours that a test lets fail, or hang, in the middle of a call.

In:  the object whose call it is, and its name.
Out: Plant, which stands in front of that call.
Law: a planted failure passes every boundary that catches Exception, as an error of our own thread does.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kv_testing.waiting import wait_for


class Bug(BaseException):
    """Ends the thread it is raised in."""


class Plant:
    """In front of one call; passes it on until it is told otherwise."""

    def __init__(self, owner: Any, name: str) -> None:
        self._call = getattr(owner, name)
        self._gone_on = threading.Event()
        self._do: Callable[[], None] = lambda: None
        self.num_met = 0
        setattr(owner, name, self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        self._do()
        return self._call(*args, **named)

    def kill(self) -> None:
        """The next thread that comes here ends."""

        def die() -> None:
            self.num_met += 1
            raise Bug("planted")

        self._do = die

    def hang(self) -> None:
        """Whoever comes here stays until `go_on`."""

        def stay() -> None:
            self.num_met += 1
            assert self._gone_on.wait(60), "a test lets it go on"

        self._do = stay

    def go_on(self) -> None:
        self._do = lambda: None
        self._gone_on.set()

    def wait_until_met(self) -> None:
        wait_for(lambda: self.num_met, what="a thread to come to the plant")


@contextmanager
def planted(owner: Any, name: str) -> Iterator[Plant]:
    """A plant, and whoever hangs in it goes on at the end."""
    plant = Plant(owner, name)
    try:
        yield plant
    finally:
        plant.go_on()
