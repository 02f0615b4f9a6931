"""Public bug reports of such systems that concern the cache manager, each with the outcome that is right (BR-nn)."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kv_core.content import item_parts
from kv_core.errors import CallerError, CapacityError
from kv_core.events import Stored
from kv_core.forecast import limits, prospect
from kv_core.ids import RequestId
from kv_core.layout import cache_pools
from kv_core.page_tables import page_table
from kv_core.scheduling import Demand, blocks_for_next_step
from kv_core.sizing import NumBlocks, agreed_blocks
from kv_core.spans import Span
from kv_core.spec import CacheSpec
from kv_core.tiers import Tier
from kv_testing.managers import manager, request, run

A = range(1, 10)


@pytest.mark.parametrize(
    ("partial", "running", "reused", "fall"), [(True, False, 7, 2), (False, False, 4, 2), (True, True, 7, 1)]
)
def test_br_01_the_last_token_of_a_prompt_is_never_found(partial, running, reused, fall):
    ours = manager(8, partial_reuse=partial)
    ours.add(request("a", A[:8]))
    ours.extend("a", [9])
    assert ours.grow("a")
    ours.publish("a")
    if not running:
        ours.release("a")
    free = ours.num_free()
    needed = ours.probe(request("b", A[:8])).num_used[64]
    progress = prospect(ours.real, request("b", A[:8]), 64)
    forecast = blocks_for_next_step(Demand(8, 4), limits(ours.real, 64), progress)
    assert min(needed, forecast) > 0
    assert ours.add(request("b", A[:8])).num_cached == reused
    assert free - ours.num_free() == fall
    assert needed == fall <= forecast


def test_br_02_free_counts_stay_within_the_pools():
    ours = manager(2, 2)
    for step in range(50):
        for name, start in (("a", step), ("b", max(0, step - 2))):
            run(ours, f"{name}{step}", range(100 * start, 100 * start + 8))
            for tier in (Tier.DEVICE, Tier.HOST):
                assert 0 <= ours.num_free(64, tier) <= 2
            places = [ours.inspect(64, block_id) for block_id in range(4)]
            assert sorted(view.tier for view in places) == [0, 0, 1, 1]
    assert (ours.num_free(64, Tier.DEVICE), ours.num_free(64, Tier.HOST)) == (2, 2)


def test_br_04_multimodal_blocks_are_found_by_whoever_has_the_same_picture():
    ours = manager(8)
    tokens = [1, 2, 0, 0, 0, 0, 7, 9, 11, 12, 13, 14, 15]
    run(ours, "a", tokens, items=[(b"H", 2)])
    assert ours.lookup(request("?", tokens[:12], items=[(b"H", 2)]), 64) == (12, (0, 1, 2))
    other = ours.lookup(request("?", tokens[:12], items=[(b"H2", 2)]), 64)
    assert other.num_tokens == 2, "the text before the picture, no whole block"
    words = [[0] * 8]
    parts = [item_parts(words, [2], [4], Span(at, at + 4)) for at in (0, 4, 8)]
    assert [[part.offset for part in found] for found in parts] == [[0], [2], []]


def test_br_06_adapters_and_salts_do_not_meet():
    ways = [(None, None), ("7", None), (None, "7"), ("7", "7"), ("0", None), (None, "0")]
    ours = manager(64, event_buffer_size=100)
    for at, (lora, salt) in enumerate(ways):
        assert run(ours, f"a{at}", A, lora=lora, salt=salt) == 0
    for at, (lora, salt) in enumerate(ways):
        assert run(ours, f"b{at}", [*A, 10], lora=lora, salt=salt) == 8
    ours.flush_events()
    stored = [event.payload for event in ours.take_events() if isinstance(event.payload, Stored)]
    keys = [block.key for payload in stored for block in payload.blocks if len(block.tokens) == 4]
    assert len(keys) == len(set(keys)) == 12


def test_br_07_the_reused_length_is_valid_in_every_window():
    ours = manager((3,), (16,), windows=(8, 32), max_sequence_length=32, partial_reuse=False)
    run(ours, "a", A)
    run(ours, "b", range(21, 30))
    assert [ours.lookup(request("?", A[:8]), size).num_tokens for size in (8, 32)] == [0, 8]
    assert ours.add(request("c", A)).num_cached == 0
    ours.release("c")
    assert (ours.num_free(8), ours.num_free(32)) == (3, 16)


def test_br_09_only_windows_that_a_layer_has_count():
    shape = {"num_heads": 1, "head_size": 8, "dtype": "float16", "tokens_per_block": 4}
    short = CacheSpec.uniform(num_layers=1, windows=(8, 64), **shape)
    assert [pool.window for pool in cache_pools(short)] == [8], "the second window has no layer"
    ours = manager(8, windows=tuple(short.groups()), max_sequence_length=64)
    assert ours.config.max_blocks_per_sequence == 16
    assert ours.add(request("a", range(6))) is not None
    pool = cache_pools(short)[0]
    assert {len(keys) for keys, _ in page_table(ours.real, [RequestId("a")], 8, pool).rows} == {16}

    long = CacheSpec.uniform(num_layers=2, windows=(512, 100_000), **shape)
    ours = manager(128, windows=tuple(long.groups()), max_sequence_length=512)
    assert ours.config.max_blocks_per_sequence == 128
    assert ours.add(request("a", range(6))) is not None
    for pool in cache_pools(long):
        assert {len(keys) for keys, _ in page_table(ours.real, [RequestId("a")], pool.window, pool).rows} == {128}


@pytest.mark.parametrize(("partial", "reused"), [(True, 6), (False, 4)])
def test_br_10_a_block_in_the_tree_is_reached_by_its_own_key(partial, reused):
    ours = manager(8, partial_reuse=partial)
    run(ours, "a", [1, 2, 3, 4, 5, 6, 70])
    assert run(ours, "b", A) == reused
    assert ours.add(request("c", [*A[:8], 20])).num_cached == 8
    table = ours.block_ids("c", 64)
    assert len(set(table)) == len(table)
    assert ours.lookup(request("?", A[:8]), 64).num_tokens == 8


def test_br_12_a_reader_of_events_predicts_what_is_reused():
    ours = manager(8, event_buffer_size=100, partial_reuse=False)
    prompts = [A, [*A[:4], *range(20, 25)], A]
    parents: dict[bytes, bytes | None] = {}
    contents: dict[bytes, tuple] = {}
    stores = []
    for at, prompt in enumerate(prompts):
        predicted, parent = 0, None
        while True:
            block = tuple(prompt[predicted : predicted + 4])
            known = [key for key, up in parents.items() if up == parent and contents[key] == block]
            if not known or predicted + 4 > len(prompt) - 1:
                break
            [parent] = known
            predicted += 4
        assert run(ours, f"r{at}", prompt) == predicted == (0, 4, 8)[at]
        ours.flush_events()
        stored = [event.payload for event in ours.take_events() if isinstance(event.payload, Stored)]
        stores += [(at, payload.parent, [block.key for block in payload.blocks]) for payload in stored]
        for payload in stored:
            above = payload.parent
            for one in payload.blocks:
                parents[one.key], contents[one.key] = above, one.tokens
                above = one.key
    (_, _, first), (_, _, second) = stores
    assert stores == [(0, None, first), (1, first[0], second)], "the third request stores nothing"
    assert (len(first), len(second), len({*first, *second})) == (2, 1, 3)


def test_br_14_a_refused_request_leaves_no_trace():
    ours = manager(5, partial_reuse=False)
    run(ours, "a", A)
    ours.add(request("c", range(50, 58)))
    assert ours.num_free() == 3
    stats, cached = ours.stats(), ours.lookup(request("?", A[:8]), 64)
    for _ in range(3):
        assert ours.add(request("b", [*A[:8], *range(80, 89)])) is None
        assert (ours.num_free(), ours.stats(), ours.lookup(request("?", A[:8]), 64)) == (3, stats, cached)
    assert ours.add(request("d", [*A[:8], 99])).num_cached == 8
    assert ours.num_free() == 0
    assert (ours.stats().num_input_tokens, ours.stats().num_cached_tokens) == (26, 8)


def test_br_17_lists_that_were_given_out_cost_and_change_nothing():
    ours = manager(1024, tokens_per_block=1, max_sequence_length=1024).real
    kept: list[list] = []

    def rounds(amount):
        for step in range(amount):
            ours.add(request("a", range(step % 7, step % 7 + 64)))
            kept.append(ours.block_ids("a", 64))
            del kept[:-8]
            ours.release("a", publish=False)

    rounds(200)
    before = resident_bytes()
    rounds(20_000)
    assert resident_bytes() - before < 5 << 20
    ours.add(request("b", range(64)))
    table = ours.block_ids("b", 64)
    table[0] = 777
    assert ours.block_ids("b", 64)[0] != 777


def resident_bytes():
    """Memory of this process now (proc(5): the second number of statm, in pages)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_br_18_ranks_agree_on_the_smallest_pools():
    ranks = [{8: NumBlocks(100, 12)}, {8: NumBlocks(90, 20)}]
    assert agreed_blocks(ranks) == {8: NumBlocks(90, 12)}
    with pytest.raises(CallerError, match=r"8, 32.*8|8.*8, 32"):
        agreed_blocks([{8: NumBlocks(9), 32: NumBlocks(9)}, {8: NumBlocks(9)}])


def test_br_19_tables_follow_rewinds_over_borders_of_blocks():
    ours = manager(8)
    ours.add(request("a", A))
    seen = []
    for change in (-1, -2, +3, -5):
        assert ours.grow("a", change) if change > 0 else ours.rewind("a", -change)
        seen.append((ours.num_tokens("a"), len(ours.block_ids("a", 64)), ours.num_free()))
    assert seen == [(8, 2, 6), (6, 2, 6), (9, 3, 5), (4, 1, 7)]
    ours.release("a")
    assert ours.num_free() == 8


def test_br_52_what_can_never_run_is_refused_at_once_with_both_numbers():
    with pytest.raises(CallerError):
        manager(0)
    ours = manager(4)
    for output in (5, 52):
        with pytest.raises(CapacityError, match=r"ours=4, theirs=(5|16)"):
            ours.add(request("a", range(12), max_new_tokens=output))
    assert ours.add(request("b", range(12), max_new_tokens=4)) is not None


def test_br_53_keys_are_the_same_in_every_process():
    program = (
        "from kv_core.keys import Scope, block_keys\n"
        "scopes = [Scope(), Scope(lora='7'), Scope(salt='7'), Scope(extras=((b'picture', 2),))]\n"
        "print([key.hex() for scope in scopes for key in block_keys(range(1, 10), scope, 4)])\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("random", "1", "2")
    }
    assert len(printed) == 1
    assert len(set(eval(printed.pop()))) == 8
