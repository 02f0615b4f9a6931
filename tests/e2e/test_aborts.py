"""Many hand-overs at once, some given up at any moment on either side: the others are right, nothing stays."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from kv_testing.answers import Question, ask, ask_with, prefill_only
from kv_testing.servers import IS_OURS, LEASE_S, SHARED_MEMORY_FIRST, wait_until
from kv_testing.servers_hooks import open_things, usage

pytestmark = [SHARED_MEMORY_FIRST, pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(900)]

NUM_REQUESTS = 32
LONGEST_PROMPT = 400
ENGINES = ("P1", "P2", "D1", "D2")
SETTLED_S = LEASE_S + 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One client: which engines it uses, what it asks, and where and when (seconds) it goes away."""

    prefill: str
    decode: str
    question: Question
    leaves: str | None
    after_s: float


def test_the_others_are_right_and_nothing_stays(fleet, run, tally, rng, fresh_prompt):
    before = _at_rest(fleet)
    plans = [_plan(ordinal, rng, fresh_prompt) for ordinal in range(NUM_REQUESTS)]
    results = run(lambda client: _all(client, fleet, plans))
    left = {plan.leaves for plan, result in zip(plans, results, strict=True) if isinstance(result, TimeoutError)}
    assert left == {"prefill", "decode"}, f"nobody left in the middle of a call on some side: {left}"
    # Before anything else is asked: whatever is still held must go by itself.
    waited = wait_until(lambda: _usages(fleet) == before and not _open(fleet), timeout_s=SETTLED_S)
    assert waited <= SETTLED_S, f"usage before={before}, now={_usages(fleet)}; open={_open(fleet)}"
    stayed = [(plan, result) for plan, result in zip(plans, results, strict=True) if plan.leaves is None]
    for plan, result in stayed:
        assert not isinstance(result, BaseException), f"{plan.prefill} to {plan.decode}: {result!r}"
        alone = run(lambda client, asked=plan.question: ask(client, fleet.engine("P1").url, asked))
        tally.demand_right(result, alone)


@pytest.mark.skipif(not IS_OURS, reason="needs the metrics of our connector")
def test_what_nobody_fetches_is_seen_and_goes_with_its_lease(fleet, run, fresh_prompt):
    """The control of the test above: what it looks at does show something that stays, and shows its end."""
    _at_rest(fleet)
    run(lambda client: prefill_only(client, fleet.engine("P1").url, Question((fresh_prompt(100),))))
    offered = wait_until(lambda: "kvferry:offers" in _open(fleet).get("P1", {}), timeout_s=LEASE_S / 2)
    assert offered < LEASE_S / 2
    assert usage(fleet.engine("P1")) > 0
    assert wait_until(lambda: not _open(fleet) and not any(_usages(fleet).values()), timeout_s=SETTLED_S) <= SETTLED_S


async def _all(client, fleet, plans):
    return await asyncio.gather(*(_follow(client, fleet, plan) for plan in plans), return_exceptions=True)


async def _follow(client, fleet, plan):
    prefill, decode = fleet.engine(plan.prefill).url, fleet.engine(plan.decode).url
    params = await _perhaps_leave(prefill_only(client, prefill, plan.question), plan, "prefill")
    return await _perhaps_leave(ask_with(client, decode, plan.question, params), plan, "decode")


async def _perhaps_leave(call, plan, side):
    """Hang up in the middle of the call, or (when it was faster) right after it."""
    if plan.leaves != side:
        return await call
    await asyncio.wait_for(call, plan.after_s)
    raise asyncio.CancelledError


def _plan(ordinal: int, rng: random.Random, fresh_prompt) -> Plan:
    prefill, decode = rng.choice([("P1", "D1"), ("P2", "D1"), ("P1", "D2")])
    side = ("prefill", "decode")[ordinal // 5 % 2] if ordinal < 10 else rng.choice(("prefill", "decode"))
    leaves = side if ordinal % 5 == 4 else None
    question = Question((fresh_prompt(rng.randint(1, LONGEST_PROMPT)),), num_answer_tokens=64 if leaves else 8)
    # The first two who leave do so at once, the others at any moment, perhaps after their call.
    return Plan(prefill, decode, question, leaves, rng.uniform(0.0, 0.05 if ordinal < 10 else 2.0))


def _at_rest(fleet):
    assert wait_until(lambda: not any(_usages(fleet).values()), timeout_s=SETTLED_S) <= SETTLED_S, _usages(fleet)
    return _usages(fleet)


def _usages(fleet):
    return {name: usage(fleet.engine(name)) for name in ENGINES}


def _open(fleet):
    return {name: things for name in ENGINES if (things := open_things(fleet.engine(name)))} if IS_OURS else {}
