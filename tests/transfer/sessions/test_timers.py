"""Time without waiting: timers and tombstones under a clock that is turned by hand."""

import pytest

from kv_transfer.timers import Timers
from kv_transfer.tombstones import Tombstones


class HandClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return HandClock()


def test_timers_run_in_order_and_cancelled_ones_never(clock):
    timers, ran = Timers(clock), []
    timers.after(2, lambda: ran.append("late"))
    cancelled = timers.after(1, lambda: ran.append("cancelled"))
    timers.after(1, lambda: ran.append("a"))
    timers.after(1, lambda: ran.append("b"))
    cancelled.cancel()
    cancelled.cancel()
    assert timers.next_delay() == 1
    timers.run_due()
    assert ran == []
    clock.now = 3
    assert timers.next_delay() == 0
    timers.run_due()
    assert ran == ["a", "b", "late"]
    assert timers.next_delay() is None


def test_a_timer_that_raises_leaves_the_others(clock):
    timers, ran = Timers(clock), []

    def bug():
        raise RuntimeError("planted")

    timers.after(1, bug)
    timers.after(1, lambda: ran.append("b"))
    clock.now = 1
    with pytest.raises(RuntimeError):
        timers.run_due()
    timers.run_due()
    assert ran == ["b"]


def test_timers_set_by_timers_run_next_time(clock):
    timers, ran = Timers(clock), []

    def again():
        timers.after(0, lambda: ran.append("second"))

    timers.after(0, again)
    timers.run_due()
    assert ran == []
    timers.run_due()
    assert ran == ["second"]


def _turn(clock, timers, seconds, step=0.01):
    for _ in range(round(seconds / step)):
        clock.now += step
        timers.run_due()


def test_a_grace_ends_after_that_time(clock):
    timers, ran = Timers(clock), []
    timers.after_running(1.0, lambda: ran.append(clock.now))
    timers.run_due()
    _turn(clock, timers, 0.9)
    assert ran == []
    _turn(clock, timers, 0.3)
    assert len(ran) == 1


def test_a_grace_begins_anew_after_a_stop(clock):
    """A stopped process reads its sockets only after it goes on: the clock alone proves nothing."""
    timers, ran = Timers(clock), []
    timers.after_running(1.0, lambda: ran.append(clock.now))
    timers.run_due()
    _turn(clock, timers, 0.95)
    clock.now += 60
    timers.run_due()
    assert ran == []
    _turn(clock, timers, 0.4)
    assert ran == []
    _turn(clock, timers, 0.2)
    assert len(ran) == 1


def test_tombstones_are_bounded_in_time_and_number():
    stones: Tombstones[int, str] = Tombstones(remember_s=10, most=3)
    for number in range(5):
        stones.bury(number, f"word {number}", float(number))
    assert len(stones) == 3
    assert stones.word(1) is None
    assert stones.word(4) == "word 4"
    stones.bury(3, "newer", 5.0)
    assert stones.word(3) == "newer"
    stones.bury(9, "x", 14.5)
    assert stones.word(2) is None
    assert stones.word(4) is None
    assert stones.word(3) == "newer"
