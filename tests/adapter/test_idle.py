"""Steps that compute nothing wait for loads, and for nothing else."""

import threading

import pytest

from kv_core.errors import CallerError
from kv_engine_adapter.config import ferry_config
from kv_engine_adapter.idle import IdleSteps, IdleWait

LONG_S = 60.0


def test_a_step_waits_only_while_nothing_is_computed():
    steps = IdleSteps(is_alone=True)
    assert steps.begins(computes=False)
    assert not steps.begins(computes=True)
    assert not steps.begins(computes=False), "the step before is not over"
    steps.ends()
    assert steps.begins(computes=False)


def test_two_steps_at_once_end_one_after_the_other():
    steps = IdleSteps(is_alone=True)
    steps.begins(computes=True)
    steps.begins(computes=True)
    steps.ends()
    assert not steps.begins(computes=False)
    steps.ends()
    assert steps.begins(computes=False)


def test_ends_of_idle_steps_are_no_credit():
    steps = IdleSteps(is_alone=True)
    steps.ends()
    steps.begins(computes=True)
    assert not steps.begins(computes=False)


def test_engines_that_step_together_never_wait():
    assert not IdleSteps(is_alone=False).begins(computes=False)


def test_what_was_told_before_ends_the_wait_and_is_used_up():
    wait = IdleWait(LONG_S)
    wait.tell()
    wait.wait(is_worth=True)
    ended = threading.Event()

    def step():
        wait.wait(is_worth=True)
        ended.set()

    threading.Thread(target=step, daemon=True).start()
    assert not ended.wait(0.05), "news of the step before ended the wait"
    wait.tell()
    assert ended.wait(LONG_S / 2)


def test_a_step_that_has_nothing_to_wait_for_does_not_and_leaves_no_old_news():
    wait = IdleWait(LONG_S)
    wait.wait(is_worth=False)
    wait.tell()
    wait.wait(is_worth=False)
    assert not wait._news.is_set()


@pytest.mark.parametrize("most_s", [0.0, 0.01])
def test_without_news_it_goes_on(most_s):
    ended = threading.Event()

    def step():
        IdleWait(most_s).wait(is_worth=True)
        ended.set()

    threading.Thread(target=step, daemon=True).start()
    assert ended.wait(LONG_S / 2), "a step waited without end"


@pytest.mark.parametrize("wrong", [-0.001, 0.2, float("nan"), "soon"])
def test_a_wait_that_is_out_of_range_is_refused(wrong):
    with pytest.raises(CallerError, match="kv_connector_extra_config"):
        ferry_config({"idle_wait_s": wrong})
    assert ferry_config({"idle_wait_s": 0}).idle_wait_s == 0
