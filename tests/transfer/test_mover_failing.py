"""The copy thread when a job, a lane or the thread itself fails or hangs: everybody is told, and blocks stay kept."""

import threading

import pytest

from kv_testing.copy_thread import WAIT_S, Thread
from kv_transfer.gate import Gate
from kv_transfer.lanes import Lane
from kv_transfer.mover import MoverFailed
from kv_transfer.pulse import NUM_LOOKS, Watcher


@pytest.fixture
def thread():
    made = Thread()
    yield made
    assert made.close()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_job_that_fails_half_way_is_told_only_when_its_copies_are_over(thread, is_lost):
    """Whoever is told gives the blocks back to the engine: a copy still queued would write somebody else's."""
    thread.copy("half", fails=ValueError("the second part does not fit"))
    thread.next_begun()
    thread.nothing_ends()
    if is_lost:
        thread.lanes.lost = RuntimeError("the device is lost")
    else:
        thread.lanes.let_on(Lane.IN)
    name, moved = thread.next_end()
    assert (name, moved.value) == ("half", None)
    assert "does not fit" in str(moved.error)


def test_a_device_that_is_lost_ends_what_runs(thread):
    thread.copy("a")
    thread.next_begun()
    thread.lanes.lost = RuntimeError("the device is lost")
    _, moved = thread.next_end()
    assert "lost" in str(moved.error)


def test_a_look_of_a_job_that_is_lost_is_not_taken(thread):
    taken = []

    def run():
        thread.lanes.queue(Lane.IN)
        thread.begun.put("look")
        return lambda: taken.append(1)

    thread.mover.submit(run, None, lambda moved: thread.ends.put(("look", moved)))
    thread.next_begun()
    thread.lanes.lost = RuntimeError("the device is gone")
    _, moved = thread.next_end()
    assert str(moved.error) == "the device is gone"
    assert not taken


def test_a_thread_that_fails_lets_run_what_runs_and_tells_all(thread):
    gate, is_planted = Gate(), threading.Event()
    thread.copy("runs", gate=gate)
    thread.next_begun()

    def end():
        is_planted.set()
        raise SystemExit("planted")

    thread.mover.submit(end, None, lambda moved: thread.ends.put(("fails", moved)))
    assert is_planted.wait(WAIT_S)
    assert not gate.shut()
    thread.lanes.let_on(Lane.IN)
    ends = dict(thread.next_end() for _ in range(2))
    assert gate.shut()
    assert {type(moved.error) for moved in ends.values()} == {MoverFailed}
    assert set(ends) == {"runs", "fails"}


def test_a_job_in_which_the_thread_fails_is_never_told_as_done(thread, monkeypatch):
    """The lane may say that it is over before the thread has failed."""

    def end_of(lane, wake):
        wake(None)
        return lambda: True

    monkeypatch.setattr(thread.lanes, "end_of", end_of)
    thread.copy("fails", fails=SystemExit("planted"))
    _, moved = thread.next_end()
    assert isinstance(moved.error, MoverFailed)


def test_a_lane_that_is_lost_leaves_the_end_to_the_copy_thread(thread):
    thread.copy("a")
    wake = thread.lanes.wakes.get(timeout=WAIT_S)
    thread.lanes.lost = RuntimeError("the device is lost")
    wake(thread.lanes.lost)
    assert "lost" in str(thread.next_end()[1].error)


def test_a_copy_that_hangs_is_seen_while_others_end(thread):
    """By the pulse of the oldest: the thread itself gets on with every end."""
    now = 0.0
    watchers = [Watcher(pulse, lambda: now, 10.0) for pulse in (thread.mover.pulse, thread.mover.oldest)]
    thread.copy("hangs")
    thread.next_begun()
    for number in range(2 * NUM_LOOKS):
        thread.copy(number, Lane.OUT)
        thread.next_begun()
        thread.lanes.let_on(Lane.OUT)
        assert thread.next_end()[0] == number
        now += 1.0
        found = [watcher.trouble() for watcher in watchers]
    assert found == ["", "the oldest copy in flight hangs: it has been in 'copy' for 10.0 s"]
    thread.lanes.let_on(Lane.IN)
    assert thread.next_end()[0] == "hangs"
    assert watchers[1].trouble() == ""


def test_copies_that_end_in_turn_do_not_hang(thread):
    now = 0.0
    watcher = Watcher(thread.mover.oldest, lambda: now, 10.0)
    thread.copy(0)
    for number in range(1, 3 * NUM_LOOKS):
        thread.copy(number)
        thread.lanes.let_on(Lane.IN)
        assert thread.next_end()[0] == number - 1
        now += 1.0
        assert watcher.trouble() == ""
    thread.lanes.let_on(Lane.IN)
    thread.next_end()
    now += 100.0
    assert watcher.trouble() == ""


def test_a_thread_that_fails_does_not_wait_for_ever_for_a_copy_that_hangs(thread, monkeypatch):
    """Everybody else is told; who hangs keeps its blocks until its lane says that it is over."""
    monkeypatch.setattr("kv_transfer.mover.GIVE_UP_S", 0.05)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    gate = Gate()
    thread.copy("hangs", gate=gate)
    thread.next_begun()
    wake = thread.lanes.wakes.get(timeout=WAIT_S)
    thread.copy("fails", Lane.OUT, fails=SystemExit("an error of our own"))
    thread.lanes.let_on(Lane.OUT)
    name, moved = thread.next_end()
    assert (name, type(moved.error)) == ("fails", MoverFailed)
    assert thread.mover.close(WAIT_S), "the thread has ended"
    assert not gate.shut()
    thread.copy("late")
    assert thread.next_end()[0] == "late"
    thread.lanes.let_on(Lane.IN)
    wake(None)
    name, moved = thread.next_end()
    assert (name, type(moved.error)) == ("hangs", MoverFailed)
    assert gate.shut()
