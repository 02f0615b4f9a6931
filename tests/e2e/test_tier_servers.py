"""Servers that share a disk tier though they are cut differently, and tiers together with hand-overs."""

import json

import pytest

from kv_engine_adapter.cli.processes import ProcessGuard
from kv_testing.answers import PREFILL_PARAMS
from kv_testing.servers import IS_OURS
from kv_testing.servers_hooks import bytes_received
from kv_testing.subscriber import Subscriber
from kv_testing.tier_servers import COSTS, SLOT_BYTES, TOKEN_BYTES, ask, flood, prompts, settle, start_tier_servers

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not IS_OURS, reason="needs our tiers"),
]

NUM_TOKENS = 717
HOST = {"tier_host_bytes": 512 * SLOT_BYTES}
# Two engines on two busy cores: no prompt is to be computed because the disk was late.
PATIENT = {"tier_disk_wait_s": 60.0}
CHILD = {"kv_connector": "FerryConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


def under_multi(options):
    """The arguments that make ours a child of vLLM's connector of several."""
    child = CHILD | {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": options}
    parent = CHILD | {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [child]}}
    # The last one of two arguments counts.
    return ("--kv-transfer-config", json.dumps(parent))


def demand_right(tally, again, first):
    tally.demand_right([again.answer], [first.answer])


def test_ranks_and_block_sizes_may_differ_and_two_engines_share_a_directory(models, tmp_path, tally):
    disk = HOST | PATIENT | {"tier_disk_dir": str(tmp_path / "kept"), "tier_disk_bytes": 1 << 28}
    shapes = {
        "two": {"tensor_ranks": 2, "cores": ("0", "1")},
        "one": {"tensor_ranks": 1, "cores": ("0",), "tokens_per_block": 64, "num_blocks": 17},
    }
    ours, theirs = prompts("shapes", 2, NUM_TOKENS)
    with ProcessGuard() as guard:
        servers = start_tier_servers(guard, tmp_path, models["tiny"], {"two": disk, "one": disk}, **shapes)
        two, one = servers["two"], servers["one"]
        first = ask(two.url, ours)
        settle(two)
        again = ask(one.url, ours)
        assert (first.num_cached, again.num_cached) == (0, NUM_TOKENS - 1), "written at two ranks, read at one"
        demand_right(tally, again, first)

        first = ask(one.url, theirs)
        settle(one)
        two.engine.program.kill()
        reborn = start_tier_servers(guard, tmp_path, models["tiny"], {"reborn": disk}, reborn=shapes["two"])["reborn"]
        again = ask(reborn.url, theirs)
        assert (first.num_cached, again.num_cached) == (0, NUM_TOKENS - 1), "written at one rank, read at two"
        demand_right(tally, again, first)


def test_tiers_under_a_connector_of_several(models, tmp_path, tally):
    (kept,) = prompts("multi", 1, NUM_TOKENS)
    with ProcessGuard() as guard:
        more = {"extra_arguments": under_multi(COSTS | HOST)}
        server = start_tier_servers(guard, tmp_path, models["tiny"], {"multi": HOST}, multi=more)["multi"]
        with Subscriber(server.event_port) as heard:
            first = ask(server.url, kept)
            flood(server.url, "multi")
            settle(server)
            again = ask(server.url, kept)
            assert (first.num_cached, again.num_cached) == (0, NUM_TOKENS - 1)
            demand_right(tally, again, first)
            assert len(heard.hear().prefix(kept, "CPU")) == NUM_TOKENS // 32


def test_hand_over_and_tiers_in_one_connector(models, tmp_path, tally):
    kept, other = prompts("both", 2, NUM_TOKENS)
    with ProcessGuard() as guard:
        cores = {"prefill": {"cores": ("0",)}, "decode": {"cores": ("1",)}}
        servers = start_tier_servers(guard, tmp_path, models["tiny"], {"prefill": HOST, "decode": HOST}, **cores)
        prefill, decode = servers["prefill"], servers["decode"]
        alone = ask(decode.url, other)

        def hand_over(prompt):
            """What a router does, in two calls; how much of the prompt came from where."""
            before = bytes_received(decode.engine)
            offered = ask(prefill.url, prompt, 1, min_tokens=1, kv_transfer_params=PREFILL_PARAMS)
            reply = ask(decode.url, prompt, kv_transfer_params=offered.params)
            handed = (bytes_received(decode.engine) - before) / TOKEN_BYTES
            # The decode engine reports what the prefill engine had in a cache.
            assert reply.num_cached == offered.num_cached
            return reply, offered.num_cached, handed

        first, num_cached, num_handed = hand_over(kept)
        assert (num_cached, num_handed) == (0, NUM_TOKENS - 1), "computed there, handed over"
        for name, server in servers.items():
            flood(server.url, name)
            settle(server)
        again, num_cached, num_handed = hand_over(kept)
        assert (num_cached, num_handed) == (NUM_TOKENS - 1, NUM_TOKENS - 1), "loaded there, handed over"
        demand_right(tally, again, first)
        # What the decode engine was handed is in its own tier too.
        flood(decode.url, "decode again")
        settle(decode)
        again = ask(decode.url, kept)
        assert again.num_cached == NUM_TOKENS - 1
        demand_right(tally, again, first)

        handed, _, num_handed = hand_over(other)
        assert num_handed == NUM_TOKENS - 1, "who is told of a peer asks the peer"
        demand_right(tally, handed, alone)
