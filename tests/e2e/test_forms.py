"""Every form of a completion call is answered after a hand-over as one engine alone answers it.

What may travel does; what a form forbids does not: log-probabilities of the prompt need every token computed.
"""

import json
import re
from typing import Any

import pytest

from kv_testing.answers import PREFILL_PARAMS, TOLERANCE, Question, ask, ask_with, complete, prefill_only
from kv_testing.servers import IS_OURS, SHARED_MEMORY_FIRST, TOKENS_PER_BLOCK
from kv_testing.servers_hooks import bytes_received

ENGINES = ("P1", "D1")
pytestmark = [
    SHARED_MEMORY_FIRST,
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_OURS, reason="needs the metrics of our connector"),
]

NUM_TOKENS = 2 * TOKENS_PER_BLOCK + 5
# Tiny model: 4 layers, K and V, 4 heads of 32 elements, float32.
WHOLE_PROMPT = (NUM_TOKENS - 1) * 4 * 2 * 4 * 32 * 4
PLAIN: dict[str, Any] = {"logprobs": None}
FORMS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": (PLAIN, WHOLE_PROMPT),
    "echo": (PLAIN | {"echo": True}, WHOLE_PROMPT),
    "echo with log-probabilities": ({"echo": True, "logprobs": 2}, 0),
    "log-probabilities of the prompt": (PLAIN | {"prompt_logprobs": 2}, 0),
    "a regular expression": (
        PLAIN | {"structured_outputs": {"regex": "[ab]{6}"}, "ignore_eos": False},
        WHOLE_PROMPT,
    ),
    "a choice": (
        PLAIN | {"structured_outputs": {"choice": ["abba", "baab"]}, "ignore_eos": False},
        WHOLE_PROMPT,
    ),
}
"""What a form adds to a call, and the bytes that its hand-over moves."""


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_answered_as_alone_and_moves_what_it_may(fleet, run, fresh_prompt, form):
    more, num_bytes = FORMS[form]
    body = Question((fresh_prompt(NUM_TOKENS),)).body() | more
    before = bytes_received(fleet.engine("D1"))
    ours = run(lambda client: _hand_over(client, fleet, body))
    assert bytes_received(fleet.engine("D1")) - before == num_bytes
    alone = run(lambda client: complete(client, fleet.engine("P1").url, body))
    _demand_same(ours["choices"], alone["choices"])
    if "structured_outputs" in more:
        assert re.fullmatch("[ab]{6}|abba|baab", ours["choices"][0]["text"]), ours


def test_a_stream_is_answered_as_alone(fleet, run, fresh_prompt):
    body = Question((fresh_prompt(NUM_TOKENS),)).body() | PLAIN
    before = bytes_received(fleet.engine("D1"))
    offer = run(lambda client: _offer(client, fleet, body))
    parts = run(lambda client: _stream(client, fleet.engine("D1").url, body | {"kv_transfer_params": offer}))
    assert bytes_received(fleet.engine("D1")) - before == WHOLE_PROMPT
    assert len(parts) > 1, "it came in one piece"
    (alone,) = run(lambda client: complete(client, fleet.engine("P1").url, body))["choices"]
    assert [token for part in parts for token in part["token_ids"] or ()] == alone["token_ids"]
    assert "".join(part["text"] for part in parts) == alone["text"]


@pytest.mark.parametrize(("salt", "num_bytes"), [
    ("tenant 1", WHOLE_PROMPT), pytest.param("tenant 2", 0, marks=pytest.mark.long),
    pytest.param(None, 0, marks=pytest.mark.long),
])  # fmt: skip
def test_what_one_salt_offers_no_other_receives(fleet, run, tally, fresh_prompt, salt, num_bytes):
    """Another salt names another prompt, whose offer may be on its way: it is computed when its deadline has passed."""
    question, before = Question((fresh_prompt(NUM_TOKENS),)), bytes_received(fleet.engine("D1"))
    offer = run(lambda client: prefill_only(client, fleet.engine("P1").url, question, salt="tenant 1"))
    answers = run(lambda client: ask_with(client, fleet.engine("D1").url, question, offer, salt=salt))
    assert bytes_received(fleet.engine("D1")) - before == num_bytes
    tally.demand_right(answers, run(lambda client: ask(client, fleet.engine("P1").url, question)))


async def _offer(client, fleet, body):
    first = body | {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": dict(PREFILL_PARAMS)}
    # Why without: the first call's answer is thrown away, and one token may be less than a grammar wants.
    first = {name: value for name, value in first.items() if name not in ("structured_outputs", "echo")}
    return (await complete(client, fleet.engine("P1").url, first))["kv_transfer_params"]


async def _hand_over(client, fleet, body):
    offer = await _offer(client, fleet, body)
    return await complete(client, fleet.engine("D1").url, body | {"kv_transfer_params": offer})


async def _stream(client, url, body):
    parts = []
    async with client.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                parts += json.loads(line.removeprefix("data: "))["choices"]
    return parts


def _demand_same(ours, alone):
    """All words and tokens equal, all log-probabilities as near as right answers are."""
    assert type(ours) is type(alone), (ours, alone)
    if isinstance(ours, dict):
        assert ours.keys() == alone.keys()
        for name in ours:
            _demand_same(ours[name], alone[name])
    elif isinstance(ours, list):
        assert len(ours) == len(alone)
        for one, other in zip(ours, alone, strict=True):
            _demand_same(one, other)
    elif isinstance(ours, float):
        assert ours == pytest.approx(alone, abs=TOLERANCE)
    else:
        assert ours == alone
