"""The judge itself: what it excuses is exactly what a rule says, also in cases that no file holds."""

import ast
from copy import deepcopy
from pathlib import Path

import pytest

from contract import functions, transfer_pair
from contract.case import Case, load_cases, written_out
from contract.expressions import BadExpression, evaluate
from contract.judge import RAISED, Observation, Rule, judge, same
from contract.verdicts import RULES, verdict_on

OPEN = {case.name: case for case in load_cases(Path(__file__).parent / "cases")}


def function_case(fn, expect, **args):
    return Case("unseen.json", {"name": "unseen", "kind": "function", "fn": fn, "args": args, "expect": expect})


WINDOW = {"input_length": 300, "output_length": 90, "sink_token_length": 0, "beam_width": 1, "tokens_per_block": 16}
MEMORY: dict[str, object] = {
    "primary_bytes": 1000,
    "secondary_bytes": 100,
    "extra_cost_bytes": 0,
    "tokens_per_block": 4,
}
MEMORY["cache_size_bytes_per_token_per_window"] = {"64": 8}
KEYS = {"a": {"tokens": [1, 2, 3], "extra_ids": [0, 0, 5]}, "b": {"tokens": [1, 2, 3]}}
ITEMS = {"hashes": [[0] * 8], "positions": [2, 5], "lengths": [4]}
UNSEEN = [
    ("core-D13", function_case("generate_block_hash_extra_keys", [], multimodal=ITEMS, start_token=0, end_token=4)),
    (
        "core-D20",
        function_case(
            "calculate_window_size_to_share",
            {"error": True},
            window_size_to_layers={},
            cache_size_per_token={"1024": 1, "2048": 6, "8192": 3},
        ),
    ),
    ("core-D21", function_case("make_retention_config", {"error": False}, ranges=[], decode_priority=101)),
    ("core-D27", function_case("calculate_max_attention_window", 106, **WINDOW, block_capacity=7)),
    ("core-D28", function_case("calculate_max_num_blocks", {"64": [32, 3]}, **MEMORY)),
    (
        "core-D45",
        function_case(
            "get_per_block_retention",
            {"priorities": [10, 20]},
            ranges=[{"start": 0, "end": 3, "priority": 10}, {"start": 3, "end": 5, "priority": 20}],
            decode_priority=35,
            block_size=4,
            seq_len=8,
        ),
    ),
    ("core-D53", function_case("block_key_partial_match", 2, **KEYS)),
]


@pytest.mark.parametrize(("defect", "case"), UNSEEN, ids=[defect for defect, _ in UNSEEN])
def test_an_unseen_case_is_judged_by_the_rule(defect, case):
    verdict = verdict_on(case)
    assert verdict.status == "deviates", verdict
    assert {one["defect"] for one in verdict.deviations} == {defect}


@pytest.mark.parametrize(("defect", "case"), UNSEEN, ids=[defect for defect, _ in UNSEEN])
def test_without_its_rule_it_fails(defect, case):
    assert verdict_on(case, [rule for rule in RULES if rule.defect != defect]).status == "failed"


WRONG = [(defect, case) for defect, case in UNSEEN if case.content["expect"] not in ({"error": True}, {"error": False})]


@pytest.mark.parametrize(("defect", "case"), WRONG, ids=[defect for defect, _ in WRONG])
def test_what_the_seed_does_not_give_is_not_excused(defect, case):
    content = deepcopy(case.content)
    content["expect"] = changed(content["expect"])
    assert verdict_on(Case(case.file, content)).status == "failed"


@pytest.mark.parametrize(("defect", "case"), WRONG, ids=[defect for defect, _ in WRONG])
def test_what_we_should_not_give_is_not_excused(defect, case, monkeypatch):
    name = case.content["fn"]
    monkeypatch.setitem(functions.FUNCTIONS, name, lambda args: changed(case.content["expect"]))
    assert verdict_on(case).status == "failed"


def changed(value):
    """Another value of the same shape."""
    if isinstance(value, dict):
        return {key: changed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [changed(item) for item in value] if value else [["00", 0]]
    return 77 if value is None else value + 1


def is_number(value):
    return isinstance(value, int) and not isinstance(value, bool)


NUMBERED = [case for case in OPEN.values() if case.kind == "function" and is_number(case.content.get("expect"))]


@pytest.mark.parametrize("case", NUMBERED, ids=lambda case: case.name)
def test_another_number_than_the_open_case_expects_fails(case):
    assert verdict_on(Case(case.file, case.content | {"expect": case.content["expect"] + 1})).status == "failed"


@pytest.mark.parametrize(
    "content",
    [
        {"kind": "wish"},
        {"kind": "function", "fn": "unheard_of", "args": {}, "expect": 1},
        {"kind": "scenario", "config": {"target": "elsewhere"}, "steps": []},
        {"kind": "unreadable: no JSON"},
        {},
    ],
)
def test_what_the_driver_does_not_know_fails(content):
    verdict = verdict_on(Case("unseen.json", {"name": "unseen"} | content))
    assert verdict.status == "failed"
    assert "unknown" in verdict.reason


def is_pair(case):
    return case.content.get("config", {}).get("target") == "transfer_pair"


def test_a_derived_expectation_of_a_function_counts():
    case = deepcopy(OPEN["ranks_cp_grows"])
    case.content["checks"][0]["expect_derived"]["peer_layer_num_in_domain_pp"] = [7]
    failures = verdict_on(case).failures
    assert [(one["field"], one["derived"]) for one in failures] == [("peer_layer_num_in_domain_pp", True)]


def test_a_buffer_that_should_be_waited_for_and_is_there_fails():
    case = deepcopy(OPEN["buffer_index_single_slot"])
    case.content["config"]["send_buffer_count"] = 2
    assert ("blocks", True, False) in {
        (one["field"], one["expected"], one["ours"]) for one in verdict_on(case).failures
    }


PAIRS = [case for case in OPEN.values() if is_pair(case)]


def test_a_pair_that_is_moved_wrongly_fails(monkeypatch):
    monkeypatch.setattr(transfer_pair, "carry", lambda *_, **__: 0)
    assert verdict_on(PAIRS[0]).failures[0]["field"] == "all_generation_blocks_match"


@pytest.mark.parametrize("field", ["need_send", "targets", "peer_ranks", "picked", "parts"])
def test_what_a_pair_expects_is_excused_only_as_the_seed_gives_it(field, monkeypatch):
    """Some pairs deviate in this field, by rule; none does when the case expects anything but the seed's answer."""
    monkeypatch.setattr(transfer_pair, "_moves", lambda *_: True)
    deviating = 0
    for case in PAIRS:
        deviating += any(one["field"].endswith(f".{field}") for one in verdict_on(case).deviations)
        content = deepcopy(case.content)
        plans = content["steps"][0].get("expect_derived", {}).get("plans", ())
        entries = [one for plan in plans for one in (*plan["senders"], *plan["receivers"]) if field in one]
        for one in entries:
            one[field] = not one[field] if field == "need_send" else [*one[field], 77]
        if entries:
            assert verdict_on(Case(case.file, content)).status == "failed", case.name
    assert deviating >= 5


def test_compact_lists_are_written_out():
    assert written_out({"a": {"range": [2, 5]}, "b": [{"repeat": [7, 3]}]}) == {"a": [2, 3, 4], "b": [[7, 7, 7]]}


@pytest.mark.parametrize(
    "text",
    [
        "().__class__",
        "open('x')",
        "__import__('os')",
        "(lambda: 1)()",
        "[x for x in (y := 1,)]",
        "exec('1')",
        "getattr(1, 'real')",
        "f'{1}'",
        "1 +",
        "unknown_name",
    ],
)
def test_expressions_reach_nothing_else(text):
    with pytest.raises(BadExpression):
        evaluate(text, {})


def test_expressions_compute():
    assert evaluate("[n * 2 for n in range(limit) if n % 2 == 1]", {"limit": 4}) == [2, 6]
    assert evaluate("\n1\n+ 2\n", {}) == 3


RULE = Rule("core-D0", "op", "field", "x > 1", "x", "x + 1", "for the test")


@pytest.mark.parametrize(
    ("expected", "actual", "x", "status"),
    [(2, 2, 2, "passed"), (2, 3, 2, "deviates"), (2, 4, 2, "failed"), (5, 3, 2, "failed"), (1, 2, 1, "failed")],
)
def test_condition_seed_and_ours_are_all_needed(expected, actual, x, status):
    assert judge([Observation("op", "field", expected, actual, {"x": x})], [RULE]).status == status


def names_in(expression):
    tree = ast.parse(f"({expression.strip()})", mode="eval")
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.defect} {rule.why[:40]}")
def test_every_rule_of_the_file_has_a_condition_and_two_values(rule):
    """A condition that nothing could change, or one value on both sides, would excuse a field or a whole file."""
    assert names_in(rule.when) - {"op", "field"}, "a condition says when"
    assert rule.seed.strip() != rule.ours.strip()
    assert rule.defect.split("-")[0] in ("core", "transfer")
    assert rule.why.endswith(".")


def test_a_rule_of_another_operation_or_field_does_not_help():
    for op, field in (("other", "field"), ("op", "other")):
        assert judge([Observation(op, field, 2, 3, {"x": 2})], [RULE]).status == "failed"


def test_a_rule_that_cannot_be_evaluated_excuses_nothing_and_is_named():
    broken = Rule("core-D0", "op", "field", "nothing", "1", "2", "for the test")
    verdict = judge([Observation("op", "field", 1, 2)], [broken])
    assert verdict.status == "failed"
    assert "nothing" in verdict.failures[0]["rule_error"]


def test_same():
    assert same([1, {"8": 2}], (1, {8: 2}))
    assert same(0.1 + 0.2, 0.3)
    assert same(RAISED, RAISED)
    assert not same(True, 1)
    assert not same([1], [1, 2])
    assert not same(1, RAISED)
