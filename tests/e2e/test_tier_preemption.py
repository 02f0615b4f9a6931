"""A decode engine with tiers and few blocks: prompts from a peer, preempted while they answer, then found in the tier.

Some clients hang up while their answer is computed, loaded or kept.
"""

import asyncio
import random
from functools import partial

import pytest

from kv_engine_adapter.cli.processes import ProcessGuard
from kv_testing.answers import Question, ask, ask_by_hand
from kv_testing.servers import IS_OURS, wait_until
from kv_testing.servers_hooks import open_things, usage
from kv_testing.tier_servers import SLOT_BYTES, prompts, settle, start_tier_servers

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not IS_OURS, reason="needs our tiers"),
]

NUM_PROMPTS, NUM_TOKENS, NUM_ANSWER = 10, 200, 150
"""Ten prompts of seven blocks that grow to eleven, on 32 blocks."""
HOST = {"tier_host_bytes": 512 * SLOT_BYTES}
PREEMPTIONS, HITS = "vllm:num_preemptions_total", "kvferry:tier_hit_tokens_total"
LEAVES_S = (0.1, 2.0)


def test_what_came_from_a_peer_and_was_preempted_comes_from_the_tier(models, tmp_path, tally, run, rng):
    questions = [Question((each,), NUM_ANSWER) for each in prompts("preempted", NUM_PROMPTS, NUM_TOKENS)]
    with ProcessGuard() as guard:
        cores = {"prefill": {"cores": ("0",)}, "decode": {"cores": ("1",)}}
        servers = start_tier_servers(guard, tmp_path, models["tiny"], {"prefill": HOST, "decode": HOST}, **cores)
        prefill, decode = servers["prefill"], servers["decode"]
        alone = run(lambda client: one_by_one(client, prefill.url, questions))
        rounds = []
        for number in range(3):
            leavers = {rng.randrange(NUM_PROMPTS) for _ in range(2)} if number else set()
            found = run(partial(all_at_once, prefill.url, decode.url, questions, leavers, rng))
            for ordinal, answers in enumerate(found):
                if ordinal not in leavers:
                    tally.demand_right(answers, alone[ordinal])
            settle(decode)
            counted = decode.engine.metrics()
            rounds.append((counted[PREEMPTIONS], counted.get(HITS, 0.0)))
        print(f"\npreemptions and tokens from the tier, after each round: {rounds}")
        assert rounds[0][0] > 0, "few blocks"
        assert rounds[-1][1] > NUM_TOKENS, "all prompts came from the peer, so only preempted ones asked the tier"
        for server in servers.values():
            settle(server)
            assert wait_until(partial(is_at_rest, server.engine), timeout_s=60) < 60, open_things(server.engine)
            assert server.engine.program.exit_code() is None


def is_at_rest(engine):
    return not open_things(engine) and not usage(engine)


async def one_by_one(client, url, questions):
    return [await ask(client, url, question, salt="alone") for question in questions]


async def all_at_once(prefill, decode, questions, leavers, dice: random.Random, client):
    """Hand all of them over; of those who leave no answer is expected."""

    async def follow(ordinal, question):
        call = ask_by_hand(client, prefill, decode, question)
        if ordinal not in leavers:
            return await call
        try:
            return await asyncio.wait_for(call, dice.uniform(*LEAVES_S))
        except TimeoutError:
            return None

    return await asyncio.gather(*(follow(ordinal, question) for ordinal, question in enumerate(questions)))
