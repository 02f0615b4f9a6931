"""Both requests of a hand-over posted at once, under an id that the client chose: it travels while it is computed."""

import asyncio
import re
import secrets
from typing import Any

import pytest

from kv_testing.answers import Question, ask, ask_with, complete, prefill_only
from kv_testing.servers import IS_OURS, LEASE_S, SHARED_MEMORY_FIRST, TOKENS_PER_STEP, wait_until
from kv_testing.servers_hooks import bytes_received, open_things, reason_in_log, usage

ENGINES = ("C1", "D1")
pytestmark = [
    SHARED_MEMORY_FIRST,
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_OURS, reason="an id chosen by the client is a form of ours"),
]

NUM_TOKENS = 7 * TOKENS_PER_STEP + 90
"""A prompt of eight steps."""
# Tiny model: 4 layers, K and V, 4 heads of 32 elements, float32.
BYTES_PER_TOKEN = 4 * 2 * 4 * 32 * 4
SETTLED_S = LEASE_S + 5.0
NUM_TRIES = 8


@pytest.fixture
def place(fleet, run, fresh_prompt):
    """Where the prefill engine's door is: a deployment knows it, a test is told with an answer."""
    question = Question((fresh_prompt(1),))
    params = run(lambda client: prefill_only(client, fleet.engine("C1").url, question))
    run(lambda client: ask_with(client, fleet.engine("D1").url, question, params))
    return {"remote_host": params["remote_host"], "remote_port": params["remote_port"]}


@pytest.mark.parametrize("head_start_s", [0.0, 0.5, -0.5], ids=["at once", "decode first", "prefill first"])
def test_both_requests_may_come_in_any_order(fleet, run, tally, fresh_prompt, place, head_start_s):
    question, before = Question((fresh_prompt(NUM_TOKENS),)), bytes_received(fleet.engine("D1"))
    answers, _ = run(lambda client: _both(client, fleet, question, place, head_start_s))
    tally.demand_right(answers, run(lambda client: ask(client, fleet.engine("C1").url, question)))
    assert bytes_received(fleet.engine("D1")) - before == (NUM_TOKENS - 1) * BYTES_PER_TOKEN
    _comes_to_rest(fleet)


def test_several_at_once_are_answered_right(fleet, run, tally, fresh_prompt, place):
    """Their steps share the engine, so each is computed in more and smaller parts."""
    questions = [Question((fresh_prompt(num_tokens),)) for num_tokens in (300, NUM_TOKENS, 33, 500, 129, 1)]

    async def all_of_them(client):
        return await asyncio.gather(*(_both(client, fleet, each, place) for each in questions))

    for question, (answers, _) in zip(questions, run(all_of_them), strict=True):
        tally.demand_right(answers, run(lambda client, asked=question: ask(client, fleet.engine("C1").url, asked)))
    _comes_to_rest(fleet)


def test_a_prefill_that_is_aborted_ends_its_load(fleet, run, tally, fresh_prompt, place):
    """And the decode engine computes for itself, at once. Sooner or later a client leaves in the middle."""
    decode, told = fleet.engine("D1"), re.escape("aborted: computed=[0, ")
    for number in range(NUM_TRIES):
        question = Question((fresh_prompt(NUM_TOKENS),))
        answers, _ = run(lambda client, n=number, q=question: _both(client, fleet, q, place, leaves_s=0.04 + 0.03 * n))
        tally.demand_right(answers, run(lambda client, q=question: ask(client, fleet.engine("C1").url, q)))
        if reason_in_log(decode, told):
            break
    assert reason_in_log(decode, told), f"nobody left in the middle of {NUM_TRIES} prompts"
    _comes_to_rest(fleet)


async def _both(client, fleet, question, place, head_start_s=0.0, leaves_s=None):
    """The decode engine's answers, and what the prefill engine said; `head_start_s` is the decode request's."""
    transfer = secrets.token_hex(16)
    prefill: Any = _after(max(0.0, head_start_s), _prefill(client, fleet.engine("C1").url, question, transfer))
    params = {"do_remote_prefill": True, "transfer_id": transfer, **place}
    decode = _after(max(0.0, -head_start_s), ask_with(client, fleet.engine("D1").url, question, params))
    prefill = prefill if leaves_s is None else asyncio.wait_for(prefill, leaves_s)
    both: Any = await asyncio.gather(prefill, decode, return_exceptions=True)
    said, answers = both
    if isinstance(answers, BaseException):
        raise answers
    if isinstance(said, BaseException) and not (leaves_s and isinstance(said, TimeoutError)):
        raise said
    return answers, said


async def _prefill(client, url, question, transfer):
    params = {"do_remote_decode": True, "transfer_id": transfer}
    body = question.body() | {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": params}
    reply = await complete(client, url, body)
    assert reply["kv_transfer_params"]["transfer_id"] == transfer
    return reply


async def _after(delay_s, call):
    await asyncio.sleep(delay_s)
    return await call


def _comes_to_rest(fleet):
    """Nothing stays open, and no block taken, at either engine."""
    engines = [fleet.engine(name) for name in ENGINES]
    waited = wait_until(lambda: not any(open_things(each) or usage(each) for each in engines), timeout_s=SETTLED_S)
    assert waited <= SETTLED_S, [(open_things(each), usage(each)) for each in engines]
