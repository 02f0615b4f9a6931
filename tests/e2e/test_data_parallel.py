"""Two data-parallel ranks behind one server on each side: any of them hands over to any other, until one is killed.

vLLM refuses to run ranks of a dense model as servers of their own: those are engines that know nothing of each other,
as in `test_chaos.py`.
"""

import asyncio
import os
import re
import signal
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kv_engine_adapter.cli.engines import EngineConfig, answers, start_engine, wait_ready
from kv_testing.answers import Answer, Question, RefusedError, answers_of, ask, ask_by_hand, complete, prefill_only
from kv_testing.servers import DEADLINE_S, IS_OURS, LEASE_S, START_S, wait_until
from kv_testing.servers_hooks import bytes_received, open_things, usage

ENGINES = ("P1",)
pytestmark = [
    pytest.mark.parametrize("fleet", ["shm"], indirect=True, scope="session"),
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not IS_OURS, reason="needs the metrics of our connector"),
]

RANKS = (0, 1)
NUM_AT_ONCE = 12
SETTLED_S = LEASE_S + 5.0
# Beyond the deadline of a load: recomputing twelve prompts on two cores.
ENDED_S = DEADLINE_S + 15.0
SERVER_ENDED_S = 30.0


@pytest.fixture
def behind_one_server(fleet):
    """One server for each role, with both ranks behind it."""
    with _running(fleet, {role: _config(fleet, role) for role in ("prefill", "decode")}) as engines:
        yield engines


def test_a_server_spreads_requests_over_its_ranks(fleet, behind_one_server, run, tally, fresh_prompt):
    prefill, decode = (behind_one_server[role].url for role in ("prefill", "decode"))
    questions = [Question((fresh_prompt(40 + 7 * number),)) for number in range(NUM_AT_ONCE)]

    async def all_of_them(client):
        return await asyncio.gather(*(ask_by_hand(client, prefill, decode, each) for each in questions))

    for question, answered in zip(questions, run(all_of_them), strict=True):
        tally.demand_right(answered, run(lambda client, asked=question: ask(client, fleet.engine("P1").url, asked)))
    assert bytes_received(behind_one_server["decode"]) > 0, "it was computed, not handed over"
    engines = [*behind_one_server.values()]
    waited = wait_until(lambda: not any(open_things(each) or usage(each) for each in engines), timeout_s=SETTLED_S)
    assert waited <= SETTLED_S, [(each.name, open_things(each), usage(each)) for each in engines]
    for engine in engines:
        assert _prompt_tokens_by_rank(engine).keys() == {"0", "1"}
        assert all(_prompt_tokens_by_rank(engine).values()), "one of its ranks had nothing to do"


def test_a_prefill_rank_is_killed(fleet, behind_one_server, run, tally, fresh_prompt):
    """vLLM ends the server of a dead rank. What was offered there is computed by the decode side, which goes on."""
    prefill, decode = (behind_one_server[role] for role in ("prefill", "decode"))
    questions = _questions(fresh_prompt)
    params = run(lambda client: _all(prefill_only(client, prefill.url, each) for each in questions))
    _kill_rank(prefill, 1)
    outcomes = run(lambda client: _all(_outcome(client, decode, *each) for each in zip(questions, params, strict=True)))
    for question, (ended, seconds) in zip(questions, outcomes, strict=True):
        assert seconds < ENDED_S
        assert not isinstance(ended, Exception), ended
        tally.demand_right(ended, run(lambda client, asked=question: ask(client, fleet.engine("P1").url, asked)))
    _check_works_again(fleet, behind_one_server, "prefill", run, tally, fresh_prompt)


def test_a_decode_rank_is_killed(fleet, behind_one_server, run, tally, fresh_prompt):
    """The prefill side keeps nothing for the dead rank's requests, and whoever comes to its server is refused.

    vLLM cuts the answers of the other rank short, saying so, and tells the clients of the dead one nothing until they
    leave: version 0.32, without a connector as well (2026-11-30).
    """
    prefill, decode = (behind_one_server[role] for role in ("prefill", "decode"))
    questions = _questions(fresh_prompt, num_answer_tokens=600)
    params = run(lambda client: _all(prefill_only(client, prefill.url, each) for each in questions))

    async def lose(client):
        calls = [asyncio.create_task(_outcome(client, decode, *each)) for each in zip(questions, params, strict=True)]
        while not bytes_received(decode) and not any(call.done() for call in calls):
            await asyncio.sleep(0.1)
        _kill_rank(decode, 1)
        gone = await asyncio.to_thread(wait_until, lambda: not answers(decode.url), timeout_s=SERVER_ENDED_S)
        assert gone <= SERVER_ENDED_S, "a server without one of its ranks takes requests"
        return await asyncio.gather(*calls)

    outcomes = [ended for ended, _ in run(lose)]
    assert any(isinstance(ended, Exception) for ended in outcomes), "all had been answered before the rank was killed"
    for question, ended in zip(questions, outcomes, strict=True):
        if isinstance(ended, RefusedError):
            assert ended.status >= 500, ended
        elif not isinstance(ended, Exception):
            alone = run(lambda client, asked=question: ask(client, fleet.engine("P1").url, asked))
            tally.demand_right(ended, [_cut(one, len(other.tokens)) for one, other in zip(alone, ended, strict=True)])
    _check_works_again(fleet, behind_one_server, "decode", run, tally, fresh_prompt)


def _check_works_again(fleet, engines, lost, run, tally, fresh_prompt):
    """The server of the dead rank has ended; the other one is at rest and hands over with another run of it."""
    (other,) = (engine for role, engine in engines.items() if role != lost)
    ended = wait_until(lambda: engines[lost].program.exit_code() is not None, timeout_s=SERVER_ENDED_S)
    assert ended <= SERVER_ENDED_S, "a server without one of its ranks goes on"
    waited = wait_until(lambda: not open_things(other) and not usage(other), timeout_s=SETTLED_S)
    assert waited <= SETTLED_S, (open_things(other), usage(other))
    engines[lost] = start_engine(fleet.guard, engines[lost].reborn(), fleet.folder)
    wait_ready([engines[lost]], timeout_s=START_S)
    prefill, decode, before = engines["prefill"].url, engines["decode"].url, bytes_received(engines["decode"])
    for question in _questions(fresh_prompt):
        answered = run(lambda client, asked=question: ask_by_hand(client, prefill, decode, asked))
        tally.demand_right(answered, run(lambda client, asked=question: ask(client, fleet.engine("P1").url, asked)))
    assert bytes_received(engines["decode"]) > before, "it was computed, not handed over"


def _questions(fresh_prompt, num_answer_tokens=8):
    return [Question((fresh_prompt(40 + 7 * number),), num_answer_tokens) for number in range(NUM_AT_ONCE)]


async def _all(calls):
    return await asyncio.gather(*calls)


async def _outcome(client, engine, question, params):
    """How a call ended, and its seconds; a client leaves in the end."""
    began = time.monotonic()
    try:
        call = complete(client, engine.url, question.body() | {"kv_transfer_params": params})
        reply = await asyncio.wait_for(call, ENDED_S)
        answered, reasons = answers_of(reply), [choice["finish_reason"] for choice in reply["choices"]]
        whole = all(len(each.tokens) == question.num_answer_tokens for each in answered)
        assert set(reasons) == ({"length"} if whole else {"abort"}), reasons
        return answered, time.monotonic() - began
    except (RefusedError, httpx.TransportError, TimeoutError) as error:
        return error, time.monotonic() - began


def _cut(answer, num_tokens):
    return Answer(answer.tokens[:num_tokens], answer.best[:num_tokens])


def _kill_rank(engine, rank):
    """End the process of one rank; vLLM gives each a title."""
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0 ") for pid in engine.program.members()}
    (pid,) = (pid for pid, title in titles.items() if title.endswith(b"EngineCore_DP%d" % rank))
    os.kill(pid, signal.SIGKILL)


def _config(fleet, name):
    return EngineConfig(
        name=name,
        model=fleet.models["tiny"],
        cores=("0", "1"),
        extra_arguments=("--data-parallel-size", str(len(RANKS))),
    )


@contextmanager
def _running(fleet, configs):
    engines = {key: start_engine(fleet.guard, each, fleet.folder) for key, each in configs.items()}
    try:
        wait_ready(engines.values(), timeout_s=START_S)
        yield engines
    finally:
        for engine in engines.values():
            engine.program.kill()


def _prompt_tokens_by_rank(engine):
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as reply:
        page = reply.read().decode()
    found = re.findall(r'^vllm:prompt_tokens_total\{engine="(\d+)".*\} (\S+)$', page, re.MULTILINE)
    return {rank: float(value) for rank, value in found}
