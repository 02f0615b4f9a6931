"""The published router, unchanged, in front of two engines: what any client of it gets is what one engine gives."""

import json

import httpx
import pytest
from openai import OpenAI

from kv_testing.answers import Question, ask
from kv_testing.servers import IS_OURS
from kv_testing.servers_hooks import bytes_received

ENGINES = ("P1", "P2", "D1")
pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(900)]

MESSAGES = [
    {"role": "system", "content": "You carry letters between islands and know every harbour by its bell."},
    {"role": "user", "content": "Which ferry leaves first when the fog lifts, and who waits at the pier?"},
]


@pytest.mark.parametrize("num_children", [1, 3])
def test_completions(fleet, run, tally, fresh_prompt, num_children):
    question = Question((fresh_prompt(101),), num_children=num_children)
    _demand_right(fleet, run, tally, question)


def test_several_prompts_in_one_call(fleet, run, tally, fresh_prompt):
    _demand_right(fleet, run, tally, Question(tuple(fresh_prompt(n) for n in (40, 1, 97))))


def test_chat_streamed_and_whole_say_the_same(fleet):
    before = bytes_received(fleet.engine("D1"))
    alone = _chat(fleet.engine("P1").url)
    assert _chat_streamed(fleet.routed()) == alone
    assert _chat(fleet.routed()) == alone
    if IS_OURS:
        assert bytes_received(fleet.engine("D1")) > before


def test_an_error_of_the_decode_engine_reaches_the_client(fleet):
    reply = httpx.post(f"{fleet.routed()}/v1/completions", json={"model": "tiny", "prompt": [5], "logprobs": 99})
    assert reply.status_code == httpx.codes.BAD_REQUEST
    assert "99" in reply.text, json.dumps(reply.text)


def _demand_right(fleet, run, tally, question):
    answers = run(lambda client: ask(client, fleet.routed(), question))
    alone = run(lambda client: ask(client, fleet.engine("P1").url, question))
    tally.demand_right(answers, alone)


def _chat(url):
    reply = _client(url).chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=16, temperature=0)
    return reply.choices[0].message.content


def _chat_streamed(url):
    stream = _client(url).chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=16, temperature=0, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def _client(url):
    return OpenAI(base_url=f"{url}/v1", api_key="none", timeout=90, max_retries=0)
