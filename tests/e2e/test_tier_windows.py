"""Models with windows, and latent ones, asked again when the device has forgotten: host memory and disk serve them too.

The hybrid model has the shape of Gemma 3: four layers slide over 80 tokens, two see all, in three cache groups.
"""

import pytest
from model.make_tiny import SHAPES

from kv_testing.tier_process import BLOCK, NOISE, NUM_BLOCKS, prompts, running_engine, same
from kv_testing.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(900)]

NUM_TOKENS = 717
COSTS = {"tier_recompute_token_s": 1.0, "tier_host_byte_s": 0.0, "tier_disk_byte_s": 0.0, "tier_start_s": 0.0}
"""Given, so that what is measured on a busy machine decides nothing."""
TIERS = {"tier_host_bytes": 1 << 26, "tier_disk_wait_s": 60.0, "tier_disk_bytes": 1 << 28} | COSTS
NUM_GROUPS = {"hybrid": 3, "chunks": 4, "windows": 1, "latent": 2}
"""A latent model has one, with blocks half as large. While a prompt is computed, each has blocks for all of it."""
WINDOW = SHAPES["hybrid"].window
LONG = WINDOW + 2 * BLOCK
"""Tokens of an answer that has left the prompt's windows behind."""


def running(models, kind, settings):
    """An engine whose device has room for one prompt of a thousand tokens."""
    num_blocks = NUM_GROUPS[kind] * (NUM_BLOCKS + 1) + 1
    return running_engine(models[kind], settings, num_gpu_blocks_override=num_blocks)


def flood(engine, name, number=2):
    """Two prompts fill the device for certain; the short one lets the copies end."""
    for prompt in prompts(f"flood {name}", number, 1000):
        assert engine.ask(prompt, 1).num_cached < BLOCK
    wait_for(lambda: engine.ask((16, 17), 1) and not engine.counts()["open"], 60)


def comes_back(engine, prompt, first, name):
    flood(engine, name)
    again = engine.ask(prompt, len(first.tokens))
    assert again.num_cached == NUM_TOKENS - 1, "every full block and the tail"
    assert same(again, first)


def test_a_hybrid_model_is_served_from_host_memory_and_after_a_restart_from_disk(models, tmp_path):
    settings = TIERS | {"tier_disk_dir": str(tmp_path / "kept")}
    short, long, shared = prompts("hybrid", 3, NUM_TOKENS)
    with running(models, "hybrid", settings) as engine:
        first = {prompt: engine.ask(prompt, number) for prompt, number in ((short, 1), (long, LONG))}
        comes_back(engine, short, first[short], "short")
        comes_back(engine, long, first[long], "long")
        flood(engine, "shared")
        other = (*long[:480], *shared[480:])
        assert engine.ask(other).num_cached == 480, "a prefix of whole blocks that ends anywhere in the prompt"

        # The controls: what is loaded of each group is what the answer is made of.
        last = (NUM_TOKENS - 1) // BLOCK - 1
        for group in range(3):
            flood(engine, f"harm {group}")
            engine.harm(long, last, group)
            harmed = engine.ask(long, 1)
            assert harmed.num_cached == NUM_TOKENS - 1
            assert abs(harmed.best[0] - first[long].best[0]) > NOISE, f"group {group}"
            engine.harm(long, last, group)
        flood(engine, "end")

    with running(models, "hybrid", settings) as engine:
        for prompt, answer in first.items():
            again = engine.ask(prompt, len(answer.tokens))
            assert again.num_cached == NUM_TOKENS - 1
            assert same(again, answer)
        assert engine.counts()["fetched_tokens"] == 2 * (NUM_TOKENS - 1)


@pytest.mark.parametrize("kind", ["latent", "windows", "chunks"])
def test_other_models_are_served_from_host_memory_and_after_a_restart_from_disk(models, tmp_path, kind):
    settings = TIERS | {"tier_disk_dir": str(tmp_path / "kept")}
    short, long = prompts(kind, 2, NUM_TOKENS)
    with running(models, kind, settings) as engine:
        first = {prompt: engine.ask(prompt, number) for prompt, number in ((short, 1), (long, LONG))}
        for prompt, answer in first.items():
            comes_back(engine, prompt, answer, f"{kind} {len(answer.tokens)}")
        flood(engine, f"{kind} control")
        engine.harm(long, (NUM_TOKENS - 1) // BLOCK - 1)
        assert not same(engine.ask(long, LONG), first[long])
        flood(engine, f"{kind} end")

    with running(models, kind, settings) as engine:
        for prompt, answer in first.items():
            again = engine.ask(prompt, len(answer.tokens))
            assert again.num_cached == NUM_TOKENS - 1
            assert same(again, answer)
