"""Programs that we start, watch, stop and end, none of which outlives us.

In:  a command line, its environment, a file for its output.
Out: a `Program`, over which we have the say, with all processes it starts.
Law: leaving the `ProcessGuard`, or dying in any way, ends every program; a second Ctrl-C does not change that.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kv_engine_adapter.cli import guard


class ProgramError(RuntimeError):
    """A program could not be started, or ended when it should not."""


class Program:
    """A started program and all processes of its session."""

    def __init__(self, owner: "ProcessGuard", pid: int, log: Path) -> None:
        self._owner = owner
        self.pid = pid
        self.log = log

    def exit_code(self) -> int | None:
        """How it ended (negative: by that signal), or `None` while it runs."""
        return self._owner.exit_code(self.pid)

    def members(self) -> tuple[int, ...]:
        """The process ids of all its living processes."""
        return guard.members(self.pid)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every process of the program."""
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """End all its processes at once, as a crash of the machine would; returns when they are gone."""
        while self.members():
            self.signal_all(signal.SIGKILL)
            time.sleep(0.02)

    def end(self, grace_s: float = guard.GRACE_S) -> None:
        """Ask it to end, then insist; returns when all its processes are gone."""
        deadline = time.monotonic() + grace_s
        self.signal_all(signal.SIGCONT)
        if self.exit_code() is None:
            os.kill(self.pid, signal.SIGTERM)
        while self.members() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()

    def log_tail(self, num_lines: int = 30) -> str:
        """The last lines it wrote."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])
        return ""


class ProcessGuard:
    """Our end of the guard process; use it with `with`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", guard.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._unread = b""
        self._ended: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> Program:
        """Start a program with exactly this environment; its output is appended to `log`."""
        request = json.dumps({"argv": list(argv), "env": dict(env), "log": str(log)})
        with self._lock:
            assert self._process.stdin is not None, "the guard is started with a pipe to its standard input"
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
            answer = self._answer()
        if "started" not in answer:
            raise ProgramError(f"cannot start {argv[0]}: {answer['refused']}")
        # Linux gives out process ids again: what ended under this one before was another program.
        self._ended.pop(answer["started"], None)
        return Program(self, answer["started"], log)

    def adopted(self, pid: int, log: Path) -> Program:
        """The program that runs under this process id: the leader of a session, orphaned by a program of ours."""
        with self._lock:
            for message in self._messages(timeout_s=0):
                self._note(message)
            if guard.members(pid):
                self._ended.pop(pid, None)
        return Program(self, pid, log)

    def exit_code(self, pid: int) -> int | None:
        """How the program with this process id ended; `None` while it runs."""
        with self._lock:
            for message in self._messages(timeout_s=0):
                self._note(message)
            return self._ended.get(pid)

    def close(self) -> None:
        """End every program and the guard; interrupted, the guard goes on by itself."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        while self._process.poll() is None:
            with self._lock:
                for message in self._messages(timeout_s=0.1):
                    self._note(message)

    def _answer(self) -> dict[str, Any]:
        while True:
            for message in self._messages(timeout_s=1.0):
                if "ended" not in message:
                    return message
                self._note(message)
            if self._process.poll() is not None:
                raise ProgramError(f"the guard process ended by itself: exit code {self._process.returncode}")

    def _note(self, message: Mapping[str, Any]) -> None:
        self._ended[message["ended"]] = message["code"]

    def _messages(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None, "the guard is started with a pipe to its standard output"
        pipe = self._process.stdout.fileno()
        if select.select([pipe], [], [], timeout_s)[0]:
            self._unread += os.read(pipe, 65536)
        while b"\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\n")
            yield json.loads(line)
