"""The paged engine gives right answers in every scenario, and wrong ones where something was broken on purpose."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from model.make_tiny import ROOT, make_tiny

from kv_core.keys import Scope
from kv_core.request import NO_SCOPE, Request
from kv_transfer.slot_copier import SlotCopier
from paged_engine import scenarios
from paged_engine.contiguous import log_probs
from paged_engine.generation import Answer, Job
from paged_engine.judging import Verdict, judge
from paged_engine.llama import Llama
from paged_engine.scenarios import ADAPTERS, SCENARIOS, TOKENS_PER_BLOCK, engine_of, play
from paged_engine.workload import random_tokens


@pytest.fixture(autouse=True)
def one_thread():
    """Many small operations: threads cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def load(windows, device="cpu"):
    return Llama(make_tiny(), windows, device=device, adapters=ADAPTERS)


def serve(scenario, tmp_path, jobs, **engine_arguments):
    with engine_of(scenario, load(scenario.windows), tmp_path, **engine_arguments) as (engine, _):
        return engine.run(jobs)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_answers_are_right(scenario, tmp_path):
    played = play(scenario, load(scenario.windows), tmp_path)
    assert played.verdict.is_right, played.verdict
    assert scenario.happened(played), played[2:]
    assert not any(tmp_path.iterdir()), "files are removed"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_answers_are_right_on_a_gpu(scenario, tmp_path):
    played = play(scenario, load(scenario.windows, "cuda"), tmp_path)
    assert played.verdict.is_right, played.verdict
    assert scenario.happened(played), played[2:]


# Negative controls.


def swap_two_blocks(slots):
    """The first two blocks of a table change places for readers."""
    size = TOKENS_PER_BLOCK
    return {window: [*own[size : 2 * size], *own[:size], *own[2 * size :]] for window, own in slots.items()}


def test_two_blocks_that_change_places_change_the_answer(tmp_path):
    random = Random(0)
    jobs = [Job(random_tokens(random, 21), 6) for _ in range(4)]
    right = serve(scenarios.OFF, tmp_path, jobs)
    wrong = serve(scenarios.OFF, tmp_path, jobs, spoil=swap_two_blocks)
    assert judge(load((None,)), right).is_right
    assert len(judge(load((None,)), wrong).wrong) == len(jobs)
    assert all(ours.beams != theirs.beams for ours, theirs in zip(right, wrong, strict=True))


@pytest.mark.parametrize("scenario", [scenarios.COPY, scenarios.HOST, scenarios.DISK], ids=lambda it: it.name)
def test_copies_that_are_not_executed_make_answers_wrong(scenario, tmp_path, monkeypatch):
    monkeypatch.setattr(SlotCopier, "copy", lambda self, order: None)
    assert play(scenario, load(scenario.windows), tmp_path).verdict.wrong


def test_a_scope_that_is_ignored_makes_answers_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr("paged_engine.engine.Request", lambda request_id, tokens, scope: Request(request_id, tokens))
    assert play(scenarios.ISOLATION, load((None,)), tmp_path).verdict.wrong


@pytest.mark.parametrize("scenario", [scenarios.SWA, scenarios.ALTERNATING], ids=lambda it: it.name)
def test_a_model_of_another_window_says_something_else(scenario, tmp_path):
    answers = play(scenario, load(scenario.windows), tmp_path).answers
    assert len(judge(load((None,)), answers).wrong) > len(answers) // 2
    assert judge(load(scenario.windows), answers).is_right


# What scenarios do not ask.


def test_nobody_finds_what_another_scope_has_stored(tmp_path):
    """The same prompt in every scope: nothing is there the first time, all but the last token the second time."""
    prompt = random_tokens(Random(1), 17)
    scopes = [*scenarios.SCOPES, Scope("two", "another"), Scope(None, ""), Scope(None, "one")]
    jobs = [Job(prompt, 4, scope) for scope in scopes]
    with engine_of(scenarios.ISOLATION, load((None,)), tmp_path) as (engine, manager):
        first = [engine.run([job])[0] for job in jobs]
        second = [engine.run([job])[0] for job in jobs]
        manager.check()
    assert [answer.num_cached for answer in first] == [0] * len(scopes)
    assert [answer.num_cached for answer in second] == [16] * len(scopes)
    assert judge(load((None,)), first + second).is_right
    by_adapter = {scope.lora: answer.beams for scope, answer in zip(scopes, first, strict=True)}
    assert len(set(by_adapter.values())) == 3, "adapters change what is said"


def test_jobs_that_start_together_with_one_prefix_compute_it_once(tmp_path):
    shared = random_tokens(Random(2), 24)
    jobs = [Job((*shared, 100 + number), 3) for number in range(4)]
    answers = serve(scenarios.REUSE, tmp_path, jobs)
    assert [answer.num_cached for answer in answers] == [0, 24, 24, 24]
    assert judge(load((None,)), answers).is_right


def test_beams_that_part_and_meet_read_what_was_written_for_their_ancestors(tmp_path):
    random = Random(3)
    scenario = replace(scenarios.BEAMS, windows=(None,))
    jobs = [Job(random_tokens(random, length), 12, NO_SCOPE, 4) for length in (4, 7, 8, 9)]
    answers = serve(scenario, tmp_path, jobs)
    assert judge(load((None,)), answers).is_right
    assert any(len({beam[0] for beam in answer.beams}) < 4 for answer in answers), "some beam died"


# The judge.


@pytest.fixture(scope="module")
def answer():
    (row,) = log_probs(load((None,)), [[20, 30, 40]], [None])
    best = row[-1].topk(5)
    return Answer(
        Job((20, 30, 40), 1), ((int(best.indices[0]),),), (float(best.values[0]),), (tuple(best.values.tolist()),), 0
    )


def test_the_judge_accepts_the_best_token_and_nothing_else(answer):
    model = load((None,))
    assert judge(model, [answer]) == Verdict(1, 0, ())
    other = replace(answer, beams=((answer.beams[0][0] ^ 1,),))
    assert "differs" in judge(model, [other]).wrong[0]
    moved = replace(answer, top=(tuple(value + 2e-4 for value in answer.top[0]),))
    assert "move" in judge(model, [moved]).wrong[0]


def test_the_judge_counts_ties(answer, monkeypatch):
    other = replace(answer, beams=((answer.beams[0][0] ^ 1,),))
    monkeypatch.setattr("paged_engine.judging.CLOSE", 100.0)
    verdict = judge(load((None,)), [other] + [answer] * 98)
    assert (verdict.num_ties, verdict.wrong, verdict.is_right) == (1, (), False)
    assert judge(load((None,)), [other] + [answer] * 99).is_right


def test_it_runs_as_the_readme_says():
    ended = subprocess.run(
        [sys.executable, str(ROOT / "examples/paged_engine/run.py"), "--only", "everything off"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "right"
