"""Two data-parallel ranks behind one server on each side: any of them hands over to any other.

vLLM refuses to run ranks of a dense model as servers of their own: those are engines that know nothing of each other,
as in `test_chaos.py`.
"""

import asyncio
import re
import urllib.request
from contextlib import contextmanager

import pytest

from kv_engine_adapter.cli.engines import EngineConfig, start_engine, wait_ready
from kv_testing.answers import Question, ask, ask_by_hand
from kv_testing.servers import IS_OURS, LEASE_S, START_S, wait_until
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

    for question, answers in zip(questions, run(all_of_them), strict=True):
        tally.demand_right(answers, run(lambda client, asked=question: ask(client, fleet.engine("P1").url, asked)))
    assert bytes_received(behind_one_server["decode"]) > 0, "it was computed, not handed over"
    engines = [*behind_one_server.values()]
    waited = wait_until(lambda: not any(open_things(each) or usage(each) for each in engines), timeout_s=SETTLED_S)
    assert waited <= SETTLED_S, [(each.name, open_things(each), usage(each)) for each in engines]
    for engine in engines:
        assert _prompt_tokens_by_rank(engine).keys() == {"0", "1"}
        assert all(_prompt_tokens_by_rank(engine).values()), "one of its ranks had nothing to do"


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
