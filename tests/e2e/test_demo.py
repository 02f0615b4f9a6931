"""`make demo` as a user runs it: it shows equal answers, and however it is stopped, nothing of it goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kv_engine_adapter.cli.guard import parents
from kv_testing.servers import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
GONE_S = 15.0


def test_the_answers_are_those_of_a_single_engine(tmp_path):
    done = _demo(tmp_path)
    said, _ = done.communicate(timeout=600)
    assert done.returncode == 0, said
    assert "All 3 answers equal those of a single engine." in said
    assert " 0 KiB" not in said, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("after_s", [0.2, 1.0, 6.0])
def test_stopped_it_leaves_nothing_behind(tmp_path, number, after_s):
    demo = _demo(tmp_path)
    time.sleep(after_s)
    family = _family(demo.pid)
    demo.send_signal(number)
    demo.wait(timeout=GONE_S)
    assert demo.returncode != 0
    waited = wait_until(lambda: not any(map(_is_alive, family)), timeout_s=GONE_S)
    assert waited < GONE_S, [pid for pid in family if _is_alive(pid)]


def test_a_server_that_does_not_start_is_shown_with_its_log(tmp_path):
    done = _demo(tmp_path, "--model", str(tmp_path / "nowhere"))
    said, _ = done.communicate(timeout=300)
    assert done.returncode == 1, said
    assert "ended with exit code" in said
    assert "nowhere" in said.split("--- the end of")[1], said


def _demo(logs, *options):
    argv = [sys.executable, "tools/demo/demo.py", "--logs", str(logs), *options]
    # A session of its own, as a terminal gives it: the demo is signalled, its servers are not.
    return subprocess.Popen(
        argv,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_hear_interrupts,
    )


def _hear_interrupts():
    """A test run that a shell put into the background ignores Ctrl-C, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _family(pid):
    """A process and all its descendants."""
    found = [pid]
    children = parents()
    for parent in found:
        found.extend(child for child, its_parent in children.items() if its_parent == parent)
    return found


def _is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and os.getpid() != pid
