"""The copy thread, over lanes that only count: what a job has queued ends before its end is told, and nobody waits."""

import queue
import threading
from contextlib import nullcontext

import pytest
import torch

from kv_transfer.gate import Gate
from kv_transfer.lanes import Lane
from kv_transfer.mover import MAX_FLIGHTS, Mover, MoverFailed
from kv_transfer.pulse import NUM_LOOKS, Watcher

WAIT_S = 10


class CountedLanes:
    """A clock for each lane: what was queued when it showed n is over when it has been let on to more than n."""

    def __init__(self):
        self.num_queued = dict.fromkeys(Lane, 0)
        self.num_over = dict.fromkeys(Lane, 0)
        self.orders = []
        self.lost = None
        self.wakes = queue.SimpleQueue()

    def mark(self):
        return None

    def on(self, lane, after):
        self.orders.append((lane, after))
        return nullcontext()

    def end_of(self, lane, wake):
        wanted = self.num_queued[lane]
        self.wakes.put(wake)

        def is_over():
            if self.lost is not None:
                raise self.lost
            return self.num_over[lane] >= wanted

        return is_over

    def close(self):
        self.is_closed = True

    def queue(self, lane):
        self.num_queued[lane] += 1

    def let_on(self, lane, num=1):
        self.num_over[lane] += num


class Thread:
    """A mover whose ends are kept in a queue; `begun` names the jobs that have begun."""

    def __init__(self):
        self.lanes, self.ends, self.begun = CountedLanes(), queue.SimpleQueue(), queue.SimpleQueue()
        self.mover = Mover(torch.device("cpu"), lambda call: call(), self.lanes)

    def copy(self, name, lane=Lane.IN, num=1, fails=None, **more):
        def run():
            self.begun.put(name)
            for _ in range(num):
                self.lanes.queue(lane)
            if fails is not None:
                raise fails
            return name

        self.mover.submit(run, None, lambda moved: self.ends.put((name, moved)), lane=lane, **more)

    def next_begun(self):
        return self.begun.get(timeout=WAIT_S)

    def next_end(self):
        return self.ends.get(timeout=WAIT_S)

    def nothing_ends(self):
        """After the thread has looked at what it has, which a job that is over at once tells."""
        self.mover.submit(lambda: None, None, lambda moved: self.ends.put(("look", moved)), lane=Lane.OUT)
        assert self.next_end()[0] == "look"


@pytest.fixture
def thread():
    made = Thread()
    yield made
    made.lanes.num_over = dict.fromkeys(Lane, 1 << 30)
    assert made.mover.close(WAIT_S)


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


def test_copies_overlap_and_lanes_do_not_wait_for_each_other(thread):
    thread.copy("in 1")
    thread.copy("in 2")
    thread.copy("out 1", Lane.OUT)
    assert [thread.next_begun() for _ in range(3)] == ["in 1", "in 2", "out 1"]
    thread.lanes.let_on(Lane.OUT)
    assert thread.next_end()[0] == "out 1"
    thread.lanes.let_on(Lane.IN)
    assert thread.next_end()[0] == "in 1"
    thread.lanes.let_on(Lane.IN)
    assert thread.next_end()[0] == "in 2"


def test_what_is_alone_waits_for_all_before_it(thread):
    """A mapping is closed when nothing reads it any more."""
    thread.copy("read")
    thread.copy("close", num=0, is_alone=True)
    thread.copy("later")
    assert thread.next_begun() == "read"
    thread.lanes.let_on(Lane.IN)
    assert [thread.next_begun() for _ in range(2)] == ["close", "later"]
    assert [thread.next_end()[0] for _ in range(2)] == ["read", "close"]


def test_no_more_than_so_many_run(thread):
    for number in range(MAX_FLIGHTS + 1):
        thread.copy(number)
    assert [thread.next_begun() for _ in range(MAX_FLIGHTS)] == list(range(MAX_FLIGHTS))
    assert thread.begun.empty()
    thread.lanes.let_on(Lane.IN)
    assert thread.next_end()[0] == 0
    assert thread.next_begun() == MAX_FLIGHTS


def test_a_job_in_steps_goes_on_when_what_it_has_queued_is_over(thread):
    seen = []

    def steps():
        thread.lanes.queue(Lane.IN)
        seen.append("queued")
        thread.begun.put("steps")
        yield
        seen.append(thread.lanes.num_over[Lane.IN])
        return 7

    thread.mover.submit(steps, None, lambda moved: thread.ends.put(("steps", moved)))
    thread.next_begun()
    thread.nothing_ends()
    assert seen == ["queued"]
    thread.lanes.let_on(Lane.IN)
    _, moved = thread.next_end()
    assert (moved.value, seen) == (7, ["queued", 1])


@pytest.mark.parametrize("fails", [None, ValueError("not what was sent")])
def test_a_last_look_is_taken_when_the_copies_are_over_by_whoever_tells_the_end(monkeypatch, fails):
    """The copy thread would look a minute later, and nothing more is waited for."""
    monkeypatch.setattr("kv_transfer.mover.LOOK_S", 60)
    thread, seen = Thread(), []

    def look():
        seen.append(thread.lanes.num_over[Lane.IN])
        if fails is not None:
            raise fails
        return 7

    def run():
        thread.lanes.queue(Lane.IN)
        return look

    thread.mover.submit(run, None, lambda moved: thread.ends.put(("look", moved)))
    wake = thread.lanes.wakes.get(timeout=WAIT_S)
    assert seen == []
    thread.lanes.let_on(Lane.IN)
    wake(None)
    _, moved = thread.next_end()
    assert (moved.value, moved.error, seen) == (None if fails else 7, fails, [1])
    wake(None)
    assert thread.ends.empty(), "it was told twice"
    assert thread.lanes.wakes.empty(), "the end of a copy was waited for twice"
    assert thread.mover.close(WAIT_S)


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


def test_a_gate_stays_entered_until_the_copies_are_over(thread):
    gate = Gate()
    thread.copy("a", gate=gate)
    thread.next_begun()
    assert not gate.shut()
    thread.lanes.let_on(Lane.IN)
    thread.next_end()
    assert gate.shut()


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


def test_a_lanes_own_thread_tells_the_end(monkeypatch):
    """At once: the copy thread would look a minute later."""
    monkeypatch.setattr("kv_transfer.mover.LOOK_S", 60)
    thread = Thread()
    thread.copy("a")
    wake = thread.lanes.wakes.get(timeout=WAIT_S)
    thread.lanes.let_on(Lane.IN)
    wake(None)
    assert thread.next_end()[0] == "a"
    wake(None)
    assert thread.ends.empty(), "it was told twice"
    assert thread.mover.close(WAIT_S)


def test_old_news_of_a_lane_does_not_end_a_job_that_went_on(thread):
    def steps():
        thread.lanes.queue(Lane.IN)
        yield
        thread.lanes.queue(Lane.IN)

    thread.mover.submit(steps, None, lambda moved: thread.ends.put(("steps", moved)))
    first = thread.lanes.wakes.get(timeout=WAIT_S)
    thread.lanes.let_on(Lane.IN)
    second = thread.lanes.wakes.get(timeout=WAIT_S)
    first(None)
    assert thread.ends.empty()
    thread.lanes.let_on(Lane.IN)
    second(None)
    assert thread.next_end()[0] == "steps"


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
