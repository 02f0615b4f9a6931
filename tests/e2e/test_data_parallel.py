"""Two data-parallel engines on each side: any of them hands over to any other, also when its neighbour is killed.

`apart`: each is a server of its own, as behind a load balancer that knows them all; `behind one server`: vLLM spreads
requests over them by itself.
"""

import asyncio
import itertools
import re
import urllib.request
from contextlib import contextmanager

import httpx
import pytest

from kv_engine_adapter.cli.engines import HOST, EngineConfig, free_port, start_engine, wait_ready
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
def apart(fleet):
    """A server for each (role, rank); those of a role know of each other."""
    configs = {
        (role, rank): _config(
            fleet, f"{role}-{rank}", (str(rank),), ("--data-parallel-rank", str(rank), "--data-parallel-rpc-port", port)
        )
        for role, port in (("prefill", str(free_port())), ("decode", str(free_port())))
        for rank in RANKS
    }
    with _running(fleet, configs) as engines:
        yield engines


@pytest.fixture
def behind_one_server(fleet):
    """One server for each role, with both ranks behind it."""
    with _running(fleet, {role: _config(fleet, role, ("0", "1")) for role in ("prefill", "decode")}) as engines:
        yield engines


def test_any_rank_hands_over_to_any_other_and_one_is_killed(fleet, apart, run, tally, fresh_prompt):
    pairs = list(itertools.product(RANKS, RANKS))
    for pair in pairs:
        _hand_over(fleet, apart, run, tally, fresh_prompt, pair)
    apart["decode", 1].program.kill()
    with pytest.raises(httpx.TransportError):
        _hand_over(fleet, apart, run, tally, fresh_prompt, (0, 1))
    for prefill in RANKS:
        _hand_over(fleet, apart, run, tally, fresh_prompt, (prefill, 0))
    # What the dead engine was offered goes with its lease.
    left = [apart["prefill", 0], apart["prefill", 1], apart["decode", 0]]
    waited = wait_until(lambda: not any(open_things(each) or usage(each) for each in left), timeout_s=SETTLED_S)
    assert waited <= SETTLED_S, [(each.name, open_things(each), usage(each)) for each in left]
    apart["decode", 1] = start_engine(fleet.guard, apart["decode", 1].reborn(), fleet.folder)
    wait_ready([apart["decode", 1]], timeout_s=START_S)
    for pair in pairs:
        _hand_over(fleet, apart, run, tally, fresh_prompt, pair)


def test_a_server_spreads_requests_over_its_ranks(fleet, behind_one_server, run, tally, fresh_prompt):
    prefill, decode = (behind_one_server[role].url for role in ("prefill", "decode"))
    questions = [Question((fresh_prompt(40 + 7 * number),)) for number in range(NUM_AT_ONCE)]

    async def all_of_them(client):
        return await asyncio.gather(*(ask_by_hand(client, prefill, decode, each) for each in questions))

    for question, answers in zip(questions, run(all_of_them), strict=True):
        tally.demand_right(answers, run(lambda client, asked=question: ask(client, fleet.engine("P1").url, asked)))
    for engine in behind_one_server.values():
        assert _prompt_tokens_by_rank(engine).keys() == {"0", "1"}
        assert all(_prompt_tokens_by_rank(engine).values()), "one of its ranks had nothing to do"


def _config(fleet, name, cores, more=()):
    return EngineConfig(
        name=name,
        model=fleet.models["tiny"],
        cores=cores,
        extra_arguments=("--data-parallel-size", str(len(RANKS)), "--data-parallel-address", HOST, *more),
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


def _hand_over(fleet, engines, run, tally, fresh_prompt, pair):
    prefill, decode = engines["prefill", pair[0]], engines["decode", pair[1]]
    question = Question((fresh_prompt(150),))
    answers = run(lambda client: ask_by_hand(client, prefill.url, decode.url, question))
    tally.demand_right(answers, run(lambda client: ask(client, fleet.engine("P1").url, question)))
    assert bytes_received(decode) > 0, "it was computed, not handed over"


def _prompt_tokens_by_rank(engine):
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as reply:
        page = reply.read().decode()
    found = re.findall(r'^vllm:prompt_tokens_total\{engine="(\d+)".*\} (\S+)$', page, re.MULTILINE)
    return {rank: float(value) for rank, value in found}
