"""A helper process that starts programs for another one and ends them all when that one is gone.

In:  standard input, one JSON object a line: `{"argv": [...], "env": {...}, "log": "path"}` starts a program.
Out: standard output, one JSON object a line: `{"started": pid}`, `{"refused": reason}`, `{"ended": pid, "code": n}`.
Law: once the other side closes standard input or dies, however it dies, every program started here and all that those
     started are gone before the guard is. Nothing else is ever signalled.

Why a process of its own: handlers at exit do not run when a test runner calls `os._exit` or is killed, and a Ctrl-C may
fall between a start and the note that it happened. Linux only: the guard adopts orphans (`PR_SET_CHILD_SUBREAPER`).
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

GRACE_S = 8.0  # vLLM 0.32 on CPU ends by itself about 2 s after SIGTERM
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Serve requests until standard input ends, then leave nothing behind."""
    signal.signal(signal.SIGTERM, lambda _signal, _frame: None)  # not SIG_IGN, which our programs would inherit
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        _serve()
    finally:
        _end_all()


def parents() -> dict[int, int]:
    """The parent of every process of this machine, by process id."""
    return {pid: fields[1] for pid, fields in _stats()}


def members(session: int) -> tuple[int, ...]:
    """The living processes of one session: a program started here and everything it started."""
    return tuple(pid for pid, (state, _, of) in _stats() if of == session and state != "Z")


def _stats() -> Iterator[tuple[int, tuple[str, int, int]]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # The name in parentheses may hold anything; state, parent, group, session follow it.
            state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            yield int(entry.name), (state, int(parent), int(session))


def _serve() -> None:
    wake, alarm = os.pipe()
    os.set_blocking(alarm, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
    requests = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _reap()
        if 0 in ready:
            arrived = os.read(0, 65536)
            if not arrived:
                return
            *lines, requests = (requests + arrived).split(b"\n")
            for line in lines:
                _tell(_started(json.loads(line)))


def _started(request: Mapping[str, Any]) -> dict[str, object]:
    try:
        with Path(request["log"]).open("ab") as log:
            child = subprocess.Popen(
                request["argv"],
                env=request["env"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        return {"refused": f"{request['argv'][0]}: {error}"}
    child.returncode = 0  # _reap waits for it, `subprocess` need not
    return {"started": child.pid}


def _reap() -> bool:
    """Take leave of processes that ended; False once there are no children at all."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        _tell({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _tell(message: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(message).encode() + b"\n")


def _end_all() -> None:
    signal.set_wakeup_fd(-1)
    deadline = time.monotonic() + GRACE_S
    asked: set[int] = set()
    while _reap():
        late = time.monotonic() > deadline
        for pid in _descendants() if late else _children() - asked:
            _signal(pid, signal.SIGKILL if late else signal.SIGTERM)
            _signal(pid, signal.SIGCONT)
            asked.add(pid)
        time.sleep(0.05)


def _children() -> set[int]:
    return {pid for pid, parent in parents().items() if parent == os.getpid()}


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found = [os.getpid()]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found[1:]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    main()
    sys.exit(0)
