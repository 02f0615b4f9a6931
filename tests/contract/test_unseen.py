"""Random cases, expected as the seed answers: each passes or deviates by a rule, as a case of the files would.

Also a comparison of kv_core's manager and of the transfer's plan with two naive models at once: in every field the
manager does what `our_model` says, and where the plan differs from the seed it does what `naive_exchange` says.
"""

import json
import os
from random import Random

import pytest

from contract.case import Case
from contract.flavours import FLAVOURS
from contract.judge import judge, same
from contract.random_cases import random_case
from contract.random_exchanges import QUESTIONS, random_exchange
from contract.random_functions import ARGUMENTS, random_question
from contract.random_policy import random_policy
from contract.scenarios import observe
from contract.verdicts import RULES, verdict_on

NUM_SHORT, NUM_LONG = 50, 1_500
NUM_QUESTIONS, NUM_QUESTIONS_LONG = 60, 5_000


def long_numbers(count):
    """Numbers of cases that the default run has not, others for each seed."""
    first = 1_000_000 * (1 + int(os.environ.get("KVFERRY_SEED", "0")))
    return range(first, first + count)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_unseen_scenarios_are_judged_by_the_rules(flavour):
    judge_many(flavour, range(NUM_SHORT))


@pytest.mark.long
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_many_unseen_scenarios(flavour, record_property):
    record_property("statuses", judge_many(flavour, long_numbers(NUM_LONG)))


def judge_many(flavour, numbers):
    statuses = {"passed": 0, "deviates": 0}
    for number in numbers:
        verdict = judge(observed(random_case(number, FLAVOURS[flavour])), RULES)
        assert verdict.status in statuses, (number, verdict.reason, verdict.failures[:2])
        statuses[verdict.status] += 1
    assert statuses["passed"] > len(numbers) // 8
    assert statuses["deviates"] > 0
    return statuses


def observed(case):
    """What is observed of a scenario. Our model says what kv_core does in every field, whatever the seed says."""
    observations = list(observe(case))
    for seen in observations:
        ours = seen.known["ours"].get(seen.field)
        assert same(ours, seen.actual), (case.name, seen.step, seen.op, seen.field, ours, seen.actual)
    return observations


def test_a_request_that_could_not_publish_its_pinned_blocks_rewinds_into_its_own():
    """Equal content is in the tree, and a pin holds the request's own: nothing of it is published, nothing copied."""
    add = {"op": "add_sequence", "request": {"tokens": list(range(9))}, "input_length": 9, "beam_width": 1}
    steps = [
        add | {"request_id": 0},
        {"op": "pin_blocks", "request_id": 0},
        add | {"request_id": 1},
        {"op": "store_context_blocks", "request_id": 1},
        {"op": "store_context_blocks", "request_id": 0},
        {"op": "rewind_kv_cache", "request_id": 0, "num_tokens": 3, "expect": {"block_ids": [0, 1], "free_blocks": 2}},
    ]
    config = FLAVOURS["plain"].config(Random(0)) | {"blocks_per_window": {"32": [8, 0]}}
    case = Case("by hand", {"name": "stuck", "kind": "scenario", "config": config, "steps": steps})
    assert judge(observed(case), []).status == "passed"


DEVIATING = [
    (flavour, number)
    for flavour in FLAVOURS
    for number in range(16)
    if verdict_on(random_case(number, FLAVOURS[flavour])).status == "deviates"
]


@pytest.mark.parametrize(("flavour", "number"), DEVIATING)
def test_no_scenario_is_excused_when_its_numbers_change(flavour, number):
    """Each expected number of the fields that deviate, one more than it is: the rule must not hold any more."""
    case = random_case(number, FLAVOURS[flavour])
    for deviation in verdict_on(case).deviations:
        expect = case.content["steps"][deviation["step"]].get("expect", {})
        value = expect.get(deviation["field"])
        if isinstance(value, int) and not isinstance(value, bool):
            expect = expect | {deviation["field"]: value + 7}
        elif isinstance(value, list) and value and isinstance(value[0], int):
            expect = expect | {deviation["field"]: [value[0] + 7, *value[1:]]}
        else:
            continue
        steps = list(case.content["steps"])
        steps[deviation["step"]] = steps[deviation["step"]] | {"expect": expect}
        assert verdict_on(Case(case.file, case.content | {"steps": steps})).status == "failed"


@pytest.mark.parametrize(("flavour", "number"), DEVIATING[:20])
def test_no_scenario_is_excused_without_its_rule(flavour, number):
    verdict = verdict_on(random_case(number, FLAVOURS[flavour]), [])
    assert verdict.status == "failed"
    assert len(RULES) > 0


def test_unseen_orders_are_judged_by_the_rules():
    judge_orders(range(800))


@pytest.mark.long
def test_many_unseen_orders():
    judge_orders(long_numbers(NUM_QUESTIONS_LONG))


def judge_orders(numbers):
    statuses = {"passed": 0, "deviates": 0}
    for number in numbers:
        verdict = verdict_on(random_policy(number))
        assert verdict.status in statuses, (number, verdict.reason, verdict.failures[:2])
        statuses[verdict.status] += 1
    assert min(statuses.values()) > 0


@pytest.mark.parametrize("name", ARGUMENTS)
def test_unseen_functions_are_judged_by_the_rules(name):
    judge_functions(name, range(NUM_QUESTIONS))


@pytest.mark.long
@pytest.mark.parametrize("name", ARGUMENTS)
def test_many_unseen_functions(name):
    judge_functions(name, long_numbers(NUM_QUESTIONS_LONG))


def test_a_function_that_is_expected_to_give_something_else_is_not_expected_to_give_our_value():
    judge_functions("calculate_max_attention_window", [1_001_634, 2_000_809])


def judge_functions(name, numbers):
    """Each passes or deviates; what deviates fails without rules, and where the case expects something else."""
    for number in numbers:
        case = random_question(number, name)
        verdict = verdict_on(case)
        assert verdict.status in ("passed", "deviates"), (number, verdict.reason, verdict.failures[:2])
        if verdict.status == "deviates":
            assert verdict_on(case, []).status == "failed"
            expect = case.content["expect"]
            if expect != {"error": True}:
                value = another(expect)
                if value == verdict.deviations[0]["ours"]:
                    value = another(value)
                other = Case(case.file, case.content | {"expect": value})
                assert verdict_on(other).status == "failed", number


def another(value):
    """Another value of the same shape."""
    if isinstance(value, dict):
        return {key: item if key == "tolerance" else another(item) for key, item in value.items()}
    if isinstance(value, list):
        return [another(item) for item in value] or [["00", 0]]
    return 77 if value is None else value + "0" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("question", QUESTIONS)
def test_unseen_questions_are_judged_by_the_rules(question):
    judge_questions(question, range(NUM_QUESTIONS))


@pytest.mark.long
@pytest.mark.parametrize("question", QUESTIONS)
def test_many_unseen_questions(question, record_property):
    record_property("statuses", judge_questions(question, long_numbers(NUM_QUESTIONS_LONG)))


def judge_questions(question, numbers):
    statuses = {"passed": 0, "deviates": 0}
    for number in numbers:
        verdict = verdict_on(random_exchange(number, question))
        assert verdict.status in statuses, (number, verdict.reason, verdict.failures[:2])
        statuses[verdict.status] += 1
    assert min(statuses.values()) > 0
    return statuses


@pytest.mark.parametrize("question", QUESTIONS)
def test_no_question_is_excused_without_rules_or_with_another_answer(question):
    """What deviates fails without rules, and when the case expects what neither the seed nor we give."""
    for number in range(30):
        case = random_exchange(number, question)
        for deviation in verdict_on(case).deviations:
            assert verdict_on(case, []).status == "failed"
            verdict = verdict_on(otherwise(case, deviation))
            excused = {(one.get("step"), one["field"]) for one in verdict.deviations}
            # The other answer of two may be ours: then there is nothing to excuse.
            other_is_ours = isinstance(deviation["ours"], bool) and deviation["field"] != "error"
            is_passed = other_is_ours and (deviation.get("step"), deviation["field"]) not in excused
            assert verdict.status == "failed" or is_passed, (number, deviation)


def otherwise(case, deviation):
    """The same case, but that another value is expected where it deviates."""
    content = json.loads(json.dumps(case.content))
    holder = content["steps"][deviation["step"]] if "step" in deviation else content
    key = "expect_derived" if deviation.get("derived") else "expect"
    expect = holder[key]
    if deviation["field"] == "value":
        holder[key] = not expect
    elif deviation["field"] == "error":
        holder[key] = {"ranks": [77], "picked": [77], "num_targets": 77, "element_counts": [77], "ok": False}
    elif "." in deviation["field"]:
        side, field = deviation["field"].split(".")
        expect["plans"][0][side][0][field] = 77
    else:
        expect[deviation["field"]] = changed(expect[deviation["field"]])
    return Case(case.file, content)


def changed(value):
    if isinstance(value, bool):
        return not value
    return value + 77 if isinstance(value, int) else [*value, 77]
