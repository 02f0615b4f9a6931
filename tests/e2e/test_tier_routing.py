"""Two engines with tiers behind the published router, which sends a prompt where its prefix is, on the device or not.

Regular mode is the one in which the router takes event sources; its policy is `kv_aware`.
"""

import contextlib
import time

import pytest

from kv_engine_adapter.cli.processes import ProcessGuard
from kv_testing.servers import IS_OURS
from kv_testing.subscriber import Subscriber
from kv_testing.tier_servers import (
    BLOCK_TOKENS,
    SLOT_BYTES,
    ask_plainly,
    counter,
    flood,
    prompts,
    settle,
    start_kv_router,
    start_tier_servers,
)
from kv_testing.waiting import wait_for

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not IS_OURS, reason="needs our tiers"),
]

NUM_TOKENS = 300
LOOKUPS = "vllm_router_kv_placement_lookups_total"
NUM_SLOTS = 100
NUM_PROMPTS, NUM_RIGHT = 12, 11
DURATION_S = 60
ROUTER_S = 2.0
"""How long the router may take to subscribe, and to read events that we have read."""


@pytest.fixture(scope="module")
def world(models, tmp_path_factory):
    """Two engines, the router, and where its counters are."""
    logs = tmp_path_factory.mktemp("tier-routing")
    options = {"tier_host_bytes": NUM_SLOTS * SLOT_BYTES}
    with ProcessGuard() as guard:
        cores = {"A": {"cores": ("0",)}, "B": {"cores": ("1",)}}
        servers = start_tier_servers(guard, logs, models["tiny"], {"A": options, "B": options}, **cores)
        router, counters = start_kv_router(guard, logs, list(servers.values()))
        time.sleep(ROUTER_S)
        yield servers, router.url, counters


def test_a_prefix_that_only_host_memory_holds_is_routed_to_its_engine(world):
    servers, router, counters = world
    owners = {prompt: "AB"[number % 2] for number, prompt in enumerate(prompts("routed", NUM_PROMPTS, NUM_TOKENS))}
    with contextlib.ExitStack() as stack:
        heard = {name: stack.enter_context(Subscriber(each.event_port)) for name, each in servers.items()}
        first = {prompt: ask_plainly(servers[owner].url, prompt) for prompt, owner in owners.items()}
        for name, server in servers.items():
            flood(server.url, name)
            settle(server)

        def is_in_host_alone(prompt):
            held = heard[owners[prompt]].hear(0.01)
            return not held.prefix(prompt, "GPU") and len(held.prefix(prompt, "CPU")) == NUM_TOKENS // BLOCK_TOKENS

        wait_for(lambda: all(map(is_in_host_alone, owners)), 60)
    time.sleep(ROUTER_S)

    before = counter(counters, LOOKUPS)
    again = {prompt: ask_plainly(router, prompt) for prompt in owners}
    lookups = {labels: number - before.get(labels, 0) for labels, number in counter(counters, LOOKUPS).items()}
    # Whoever has it in host memory loads it whole; the other one would compute it.
    num_right = [num_cached for _, num_cached in again.values()].count(NUM_TOKENS - 1)
    print(f"\nrouted to the engine that has it: {num_right} of {NUM_PROMPTS}; lookups: {lookups}")
    assert num_right >= NUM_RIGHT
    assert [text for text, _ in again.values()] == [text for text, _ in first.values()]
    assert lookups['result="hit"'] >= NUM_RIGHT, lookups


def test_retention_is_asked_for_through_the_router_and_ends(world):
    servers, router, _ = world
    kept, other = prompts("retained", 2, NUM_TOKENS)
    assert ask_plainly(router, other)[1] == 0
    hint = {"kvferry.retain": [f"0-:90:{DURATION_S}s"]}
    first, num_cached = ask_plainly(router, kept, vllm_xargs=hint)
    assert num_cached == 0
    flood_all(servers, "before")
    assert ask_plainly(router, kept) == (first, NUM_TOKENS - 1)
    assert ask_plainly(router, other)[1] == 0, "the flood evicts everything else"

    time.sleep(DURATION_S + 1)
    flood_all(servers, "after")
    assert ask_plainly(router, kept) == (first, 0), "its time is over"


def flood_all(servers, when):
    """More than the host tier has room for, on every engine."""
    for name, server in servers.items():
        flood(server.url, f"{name} {when}", 1 + NUM_SLOTS // 31)
        settle(server)
