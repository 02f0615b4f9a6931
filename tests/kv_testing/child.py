"""A process that does what it is told over a pipe, to be stopped, killed and looked at from outside.

In:  a function to run in it, which answers orders (`serve`).
Out: answers; whether it is stopped or dead; what it holds of the operating system.
Law: `with Child(...)` leaves no process behind, whatever its state. An order that raises there raises here.
"""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from kv_testing.waiting import wait_for

ANSWER_TIMEOUT_S = 180.0
"""Seen on 2 cores with 40 processes that compute: 45 s until NIXL's own thread first ran, of which its start waits
spinning. Alone, a start takes 0.6 s."""


KILL_TIMEOUT_S = 100.0
"""Seen on 2 cores with a load of 25: more than 20 s until a killed process was reaped."""
SHARED_IMPORTS = ["torch", "kv_transfer.agent.pump", "kv_transfer.transceiver"]
"""Imported once for all such processes, which then start fast."""


class ChildDied(Exception):
    """The process ended before it answered."""


class OrderFailed(Exception):
    """The order raised in the process; the text is its traceback."""


@dataclass(frozen=True)
class Held:
    """What a process holds of the operating system."""

    num_threads: int
    num_handles: int
    resident_bytes: int


class Child:
    """The handle of the process."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        """Runs `target(pipe, *arguments)` in a process of its own, and returns at once."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(SHARED_IMPORTS)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._num_open = 0

    def ask(self, order: str, *arguments: object) -> Any:
        """Its answer. Raises ChildDied; or OrderFailed, if this or an order before it failed there."""
        self.tell(order, *arguments)
        end = time.monotonic() + ANSWER_TIMEOUT_S
        failures = []
        while self._num_open:
            assert self._pipe.poll(max(0.0, end - time.monotonic())), f"no answer to {order}"
            failure, answer = self._pipe_receive()
            self._num_open -= 1
            failures += [failure] if failure else []
        if failures:
            raise OrderFailed("\n".join(failures))
        return answer

    def tell(self, order: str, *arguments: object) -> None:
        """An order whose answer nobody waits for: the process may be about to stop, or to die."""
        try:
            self._pipe.send((order, arguments))
        except OSError as error:
            raise ChildDied(f"process {self.pid} takes no orders any more") from error
        self._num_open += 1

    def stop(self) -> None:
        """SIGSTOP; returns when every thread of the process has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_for(lambda: self.is_stopped, what="the process to stop")

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self._process.kill()
        self._process.join(KILL_TIMEOUT_S)
        assert not self._process.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def is_stopped(self) -> bool:
        """Whether every thread of it stands still."""
        states = set()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                states.add((task / "stat").read_text().rsplit(")", 1)[1].split()[0])
        return states == {"T"}

    @property
    def held(self) -> Held:
        """Looked up from outside, so that looking changes nothing."""
        process = Path(f"/proc/{self.pid}")
        pages = int((process / "statm").read_text().split()[1])
        num_threads, num_handles = (len(list((process / name).iterdir())) for name in ("task", "fd"))
        return Held(num_threads, num_handles, pages * os.sysconf("SC_PAGE_SIZE"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.close()
        self._pipe.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def first_word(self) -> Any:
        """What it says before it is asked; waits for it."""
        assert self._pipe.poll(ANSWER_TIMEOUT_S), "the process says nothing"
        return self._pipe_receive()

    def _pipe_receive(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ChildDied(f"process {self.pid} ended without an answer") from error


def serve(
    pipe: Connection, obey: Callable[..., Any], step: Callable[[], object] = lambda: None, step_s: float | None = None
) -> None:
    """The process's loop: answers orders with what `obey(order, *arguments)` returns, until the pipe closes.

    Meanwhile, if `step_s` is given, a step at least that often.
    """
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            step()
            if pipe.poll(step_s):
                order, arguments = pipe.recv()
                pipe.send(_answer(obey, order, arguments))


def _answer(obey: Callable[..., Any], order: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "", obey(order, *arguments)
    except Exception:
        return traceback.format_exc(), None
