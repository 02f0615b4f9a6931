"""Prompts asked again of a real engine whose device has forgotten them: they come from host memory, and from disk.

One engine keeps, the next one finds on disk what the first has left. The device has room for one prompt of a thousand
tokens, which floods it.
"""

import pytest

from kv_core.spans import Span
from kv_engine_adapter.cli.engines import free_port
from kv_testing.subscriber import Subscriber
from kv_testing.tier_process import BLOCK, prompts, running_engine, same
from kv_testing.waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(900)]

NUM_TOKENS = 717
# Why so long a wait: an engine in its caller's process steps without a pause while a prompt waits, and a disk's thread
# that needs the interpreter for each file then takes seconds on two busy cores.
COSTS = {"tier_recompute_token_s": 1.0, "tier_host_byte_s": 0.0, "tier_disk_byte_s": 0.0, "tier_start_s": 0.0}
"""Given, so that what is measured on a busy machine decides nothing."""
TIERS = {"tier_host_bytes": 1 << 26, "tier_disk_wait_s": 60.0} | COSTS
RECORD = 64


def flood(engine, prompt):
    assert engine.ask(prompt, 1).num_cached < BLOCK


def test_prompts_come_back_from_host_memory_and_after_a_restart_from_disk(models, tmp_path):
    disk = {"tier_disk_dir": str(tmp_path / "kept"), "tier_disk_bytes": 1 << 28}
    kept, damaged, broken = prompts("kept", 3, NUM_TOKENS)
    floods = iter(prompts("flood", 12, 1000))
    port = free_port()
    with Subscriber(port) as heard, running_engine(models["tiny"], TIERS | disk, event_port=port) as engine:
        first = engine.ask(kept, **{"kvferry.retain": ["0-:90:600s"], "kvferry.directory": "/elsewhere"})
        assert first.num_cached == 0
        assert engine.counts()["hints_refused"] == 1
        on_device = heard.hear().prefix(kept, "GPU")
        assert len(on_device) == NUM_TOKENS // BLOCK
        flood(engine, next(floods))
        wait_for(lambda: engine.ask((16, 17), 1) and heard.hear().prefix(kept, "STORAGE"), 60)
        assert not heard.prefix(kept, "GPU")
        assert heard.prefix(kept, "CPU") == heard.prefix(kept, "STORAGE") == on_device, "what only our tiers hold"
        again = engine.ask(kept)
        assert again.num_cached == NUM_TOKENS - 1, "every full block and the tail"
        assert same(again, first)
        assert engine.counts()["hit_tokens"] == NUM_TOKENS - 1
        answers = [engine.ask(prompt) for prompt in (damaged, broken)]

        # The control: what is loaded is what the answer is made of.
        flood(engine, next(floods))
        engine.harm(kept, 3)
        harmed = engine.ask(kept)
        assert harmed.num_cached == NUM_TOKENS - 1
        assert not same(harmed, first)

        # An engine in its caller's process steps for requests alone, so the last copy ends with the next one.
        wait_for(lambda: engine.ask((16, 17), 1) and not engine.counts()["open"], 60)
        engine.forget()
        assert heard.prefix(kept, "CPU") == on_device
        assert ("BlockRemoved", "CPU") not in heard.kinds
        engine.ask((16, 17), 1)
        assert not any(heard.hear().prefix(kept, medium) for medium in ("GPU", "CPU", "STORAGE"))
        assert ("BlockRemoved", "CPU") in heard.kinds
        assert engine.ask(kept).num_cached == 0, "a reset forgets the disk too"
        assert same(engine.ask(damaged), answers[0])

    corrupt(tmp_path, damaged, 5)
    with running_engine(models["tiny"], TIERS | disk | {"tier_verify": True}, "recompute") as engine:
        again = engine.ask(kept)
        assert again.num_cached == NUM_TOKENS - 1
        assert same(again, first)
        assert engine.counts()["fetched_tokens"] == NUM_TOKENS - 1
        flood(engine, next(floods))
        again = engine.ask(damaged)
        assert again.num_cached == 5 * RECORD, "up to the damaged file, which is a miss"
        assert same(again, answers[0])
        assert engine.counts()["read corrupt"] == 1

        # The control of verification: the same harm as before is seen.
        engine.ask(broken)
        flood(engine, next(floods))
        engine.harm(broken, 3)
        again = engine.ask(broken)
        assert same(again, answers[1])
        assert engine.counts()["loads_failed"] == 1


def corrupt(directory, prompt, record):
    """Flip one bit of a record's file."""
    from kv_core.keys import Scope
    from kv_transfer.prefix_store.chain import PrefixChain

    ((_, key),) = PrefixChain(prompt, Scope(), RECORD).records(Span(record * RECORD, (record + 1) * RECORD))
    (path,) = directory.rglob(f"{key.hex()}/*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
