"""Who hangs, who rests and who gets on, by a clock that is turned by hand."""

import pytest

from kv_transfer.health import Health
from kv_transfer.pulse import Pulse, Watcher
from kv_transfer.timers import Timers


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def looked(watcher, clock, num_looks, step_s=1.0):
    for _ in range(num_looks):
        clock.now += step_s
        watcher.trouble()
    return watcher.trouble()


def test_a_thread_that_stays_in_one_call_hangs_and_may_come_back(clock) -> None:
    pulse = Pulse("copy thread")
    watcher = Watcher(pulse, clock, 10.0)
    pulse.begins("copy")
    assert looked(watcher, clock, 10) == ""
    assert looked(watcher, clock, 1) == "the copy thread hangs: it has been in 'copy' for 10.0 s"
    pulse.begins("copy")
    assert watcher.trouble() == "", "that it gets on is believed at once"
    assert looked(watcher, clock, 9) == ""


def test_a_thread_that_rests_or_gets_on_does_not_hang(clock) -> None:
    pulse = Pulse("copy thread")
    watcher = Watcher(pulse, clock, 10.0)
    assert looked(watcher, clock, 50) == ""
    for _ in range(50):
        pulse.begins("copy")
        assert looked(watcher, clock, 1) == ""


def test_time_in_which_nobody_looked_does_not_count(clock) -> None:
    """The process was stopped: its threads were, too."""
    pulse = Pulse("copy thread")
    watcher = Watcher(pulse, clock, 10.0)
    pulse.begins("copy")
    assert looked(watcher, clock, 3, step_s=1000.0) == ""
    clock.now += 0.5
    assert [watcher.trouble() for _ in range(100)] == [""] * 100, "many looks at once are one"


def test_the_first_failure_is_told_once_and_stays(clock, caplog) -> None:
    timers, told = Timers(clock), []
    agent, copies = Pulse("agent's thread"), Pulse("copy thread")
    health = Health(timers, (agent, copies), 10.0)
    health.start(told.append)
    assert health.look() == ""
    agent.ends("Bug()")
    agent.ends("another")
    assert health.look()
    assert not told, "not inside a look: whoever looks is about to decide on what this may end"
    for _ in range(5):
        clock.now += 1.0
        timers.run_due()
    assert (health.trouble, health.num_troubled) == ("the agent's thread has failed: Bug()", 1)
    assert told == [health.trouble]
    copies.begins("copy")
    for _ in range(12):
        clock.now += 1.0
        timers.run_due()
    assert health.num_troubled == 2
    assert "the copy thread hangs" in health.trouble
    copies.rests()
    clock.now += 1.0
    timers.run_due()
    assert (health.trouble, len(told)) == ("the agent's thread has failed: Bug()", 1)
    assert "nothing new is begun: the agent's thread has failed" in caplog.text
