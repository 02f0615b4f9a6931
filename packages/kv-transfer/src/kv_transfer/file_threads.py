"""Calls to a file system, in threads that can be left behind.

In:  a function that works on files.
Out: what it returns or raises; Hung if that takes longer than `limit_s`.
Law: nobody waits longer. A call that was given up stays in its thread until it ends, and keeps what it may still touch:
     so it works on memory, names and descriptors of its own, and whatever comes of it is not looked at. While one hangs
     nothing else is asked, and callers are told at once; when it has ended, files are used again.

A call that waits for a server that is gone, or for a disk that repeats itself, cannot be ended from outside. Why not
`concurrent.futures` for the threads too: at the end of the interpreter it joins them, and one of these may never end.
"""

import errno
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from time import monotonic
from typing import Any, Final, TypeVar

from kv_transfer.file_mover import FILE_LIMIT_S, Hung, NotAsked
from kv_transfer.threads import leave_pinned_core

logger = logging.getLogger(__name__)

T = TypeVar("T")
Task = tuple["Future[Any]", Callable[[], Any]]
Inbox = SimpleQueue[Task | None]

_CLOSE_S: Final = 1.0
"""An idle thread ends at once; on a machine without time it may take a moment."""


class FileThreads:
    """Calls of any number of callers, each in a thread of its own. Thread-safe."""

    def __init__(self, limit_s: float = FILE_LIMIT_S) -> None:
        self.limit_s = limit_s
        self._lock = threading.Lock()
        self._idle: list[Inbox] = []
        self._threads: dict[Inbox, threading.Thread] = {}
        self._given_up: dict[Future[Any], str] = {}
        self._is_closed = False

    @property
    def hung(self) -> tuple[str, ...]:
        """What was given up and has not ended."""
        with self._lock:
            return tuple(self._given_up.values())

    def call(self, what: str, run: Callable[[], T]) -> T:
        """What `run` returns, or raises. Hung if it does not end in time; NotAsked while another call hangs.

        `what` is for logs. OSError after `close`.
        """
        future: Future[T] = Future()
        with self._lock:
            self._check(what)
            inbox = self._idle.pop() if self._idle else self._new_thread()
            inbox.put((future, run))
        wait([future], self.limit_s)
        with self._lock:
            is_late = not future.done()
            if is_late:
                self._given_up[future] = what
        if is_late:
            logger.error("files: %s does not end within %s s; nothing is asked until it does", what, self.limit_s)
            raise Hung(errno.ETIMEDOUT, f"a file system hangs: {what} did not end within {self.limit_s} s")
        return future.result()

    def close(self) -> bool:
        """End the threads; False if some hang in a call, and are left behind. Idempotent."""
        with self._lock:
            self._is_closed = True
            for inbox in self._idle:
                inbox.put(None)
            ending = [self._threads[inbox] for inbox in self._idle]
            self._idle.clear()
        deadline = monotonic() + _CLOSE_S
        for thread in ending:
            thread.join(max(0.0, deadline - monotonic()))
        return not self.hung

    def _check(self, what: str) -> None:
        if self._is_closed:
            raise OSError(errno.ESHUTDOWN, f"files are closed: {what}")
        if self._given_up:
            hung = ", ".join(self._given_up.values())
            raise NotAsked(errno.ETIMEDOUT, f"a file system hangs: {what} waits for nobody, {hung} has not ended")

    def _new_thread(self) -> Inbox:
        inbox: Inbox = SimpleQueue()
        thread = threading.Thread(target=self._serve, args=(inbox,), name="kvferry-files", daemon=True)
        self._threads[inbox] = thread
        thread.start()
        return inbox

    def _serve(self, inbox: Inbox) -> None:
        leave_pinned_core()
        while (task := inbox.get()) is not None and self._obey(inbox, *task):
            del task  # what a call kept is free from now on, not when the next one comes

    def _obey(self, inbox: Inbox, future: "Future[Any]", run: Callable[[], Any]) -> bool:
        """Run one call; whether the thread goes on."""
        result, error = None, None
        try:
            result = run()
        except BaseException as raised:
            error = raised
        with self._lock:
            late = self._given_up.pop(future, None)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            if not self._is_closed:
                self._idle.append(inbox)
            goes_on = not self._is_closed
        if late is not None:
            logger.warning("files: %s has ended after all", late)
        return goes_on
