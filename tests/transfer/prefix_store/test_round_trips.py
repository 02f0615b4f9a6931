"""What one cut of a model wrote, any other reads: ranks, block sizes, block orders, kinds of attention."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.ids import BlockId, Rank
from kv_core.keys import Scope
from kv_core.spans import Span
from kv_testing.stores import (
    HEADS,
    LAYERS,
    config_of,
    cut,
    full_world,
    misses,
    num_wrong,
    prompt,
    read_all,
    record_files,
    write_all,
)
from kv_testing.tagged import FORMS, make_world
from kv_transfer.plan.cache_state import BlockLayout, ParallelLayout
from kv_transfer.plan.ranges import HOLE
from kv_transfer.plan.side_pools import indexer_pool, scale_pool
from kv_transfer.prefix_store.store import PrefixStore

NUM_TOKENS = 75


def assert_carried(directory, writer, reader, forms=("CBTHD", "CBTHD"), num_tokens=NUM_TOKENS, **config):
    wanted = Span(0, num_tokens)
    source, target = full_world(writer, num_tokens, forms[0], 1), make_world(reader, num_tokens, forms[1], 2)
    ours, theirs = (PrefixStore(config_of(directory, **config), state) for state in (writer, reader))
    chain = ours.chain(prompt(num_tokens))
    assert {outcome.why for outcome in write_all(ours, chain, source, wanted)} == {None}
    assert theirs.lookup(chain) == num_tokens
    assert num_wrong(target, wanted) > 0
    assert read_all(theirs, chain, target, wanted) == {num_tokens}
    assert num_wrong(target, wanted) == 0
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("sizes", "tps"), [((16, 32), (2, 1)), ((32, 16), (1, 2)), ((16, 64), (4, 2)), ((64, 16), (2, 4))]
)
@pytest.mark.parametrize("orders", [("token_major", "head_major"), ("head_major", "token_major")])
def test_other_ranks_and_other_blocks_read_it(tmp_path, sizes, tps, orders):
    writer, reader = (
        cut(tp, tokens_per_block=size, order=order) for tp, size, order in zip(tps, sizes, orders, strict=True)
    )
    forms = tuple(FORMS[order][0] for order in orders)
    assert_carried(tmp_path, writer, reader, forms)


def parallels():
    return st.tuples(st.sampled_from((1, 2, 3, 4, 6)), st.sampled_from(((3,), (1, 2), (2, 1), (1, 1, 1))))


@settings(max_examples=25)
@given(st.data(), parallels(), parallels(), st.integers(1, 80), st.sampled_from((1, 5, 16, 24)))
def test_any_cut_reads_any_other(tmp_path_factory, data, ours, theirs, num_tokens, tokens_per_record):
    dtype = data.draw(st.sampled_from(("float32", "bfloat16", "uint8")))
    states, forms = [], []
    for tp, stages in (ours, theirs):
        order = data.draw(st.sampled_from(("head_major", "token_major")))
        forms.append(data.draw(st.sampled_from(FORMS[order])))
        size = data.draw(st.sampled_from((1, 3, 8, 16, 32, 64)))
        states.append(cut(tp, stages, size, order, dtype=dtype))
    directory = tmp_path_factory.mktemp("drawn")
    writer, reader = states
    assert_carried(directory, writer, reader, tuple(forms), num_tokens, tokens_per_record=tokens_per_record)


@pytest.mark.parametrize(("tps", "sizes"), [((2, 1), (16, 64)), ((1, 4), (64, 16))])
def test_latent_attention(tmp_path, tps, sizes):
    writer, reader = (
        cut(tp, tokens_per_block=size, attention="latent", num_kv_heads=1, num_planes=1, head_size=9)
        for tp, size in zip(tps, sizes, strict=True)
    )
    assert_carried(tmp_path, writer, reader)


def test_equal_ranks_write_a_latent_record_once(tmp_path):
    state = cut(4, attention="latent", num_kv_heads=1, num_planes=1)
    store = PrefixStore(config_of(tmp_path), state)
    written = write_all(store, store.chain(prompt(32)), full_world(state, 32), Span(0, 32))
    assert [outcome.num_bytes > 0 for outcome in written] == [True, False, False, False]


def test_side_pools_have_records_of_their_own(tmp_path):
    values = [cut(tp, tokens_per_block=size, dtype="uint8", head_size=16) for tp, size in ((2, 16), (1, 32))]
    for beside in (lambda state: indexer_pool(state, 8, 8), scale_pool):
        assert_carried(tmp_path, *map(beside, values))
    assert_carried(tmp_path, *values)
    assert len(list((tmp_path / "store").glob("v1-*"))) == 3


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (cut(layout=BlockLayout("head_major", "packed")), "opaque tiles"),
        (cut(parallel=ParallelLayout.even(1, [LAYERS], HEADS, cp=2)), "share the tokens"),
        (cut(attention="mystery"), "no formatter"),
    ],
)
def test_what_cannot_be_cut_into_records_is_refused(tmp_path, state, why):
    with pytest.raises(ValueError, match=why):
        PrefixStore(config_of(tmp_path), state)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("wanted", [Span(0, 75), Span(16, 48), Span(20, 41), Span(33, 34), Span(70, 75), Span(0, 7)])
def test_a_span_within_the_prompt_fills_nothing_else(tmp_path, wanted):
    state = cut(2)
    store = PrefixStore(config_of(tmp_path), state)
    chain = store.chain(prompt(75))
    write_all(store, chain, full_world(state, 75), Span(0, 75))
    target = make_world(state, 75, "CBTHD", 2)
    assert read_all(store, chain, target, wanted) == {len(wanted)}
    assert num_wrong(target, wanted) == 0


def test_a_tail_serves_longer_prompts_and_other_prompts_end_where_they_differ(tmp_path):
    state = cut()
    store = PrefixStore(config_of(tmp_path), state)
    write_all(store, store.chain(prompt(37)), full_world(state, 37), Span(0, 37))
    assert store.lookup(store.chain(prompt(90))) == 37
    assert store.lookup(store.chain(prompt(36))) == 32
    assert store.lookup(store.chain([*prompt(20), 9, *prompt(60)])) == 16
    assert store.lookup(store.chain(prompt(37), Scope(salt="other"))) == 0
    longer = make_world(state, 90, "CBTHD", 2)
    assert read_all(store, store.chain(prompt(90)), longer, Span(0, 90)) == {37}
    assert num_wrong(longer, Span(0, 37)) == 0


def test_items_count_in_a_tail_if_they_began_in_it(tmp_path):
    state = cut()
    store = PrefixStore(config_of(tmp_path), state)
    write_all(store, store.chain(prompt(20)), full_world(state, 20), Span(0, 20))
    for start, num_held in ((20, 20), (19, 16), (16, 16), (15, 0)):
        scope = Scope(extras=((b"picture", start),))
        assert store.lookup(store.chain(prompt(40), scope)) == num_held


def test_a_full_record_serves_a_prompt_that_ends_inside_a_span(tmp_path):
    """An engine computes the last token of a prompt itself."""
    state = cut()
    store = PrefixStore(config_of(tmp_path), state)
    chain = store.chain(prompt(32))
    write_all(store, chain, full_world(state, 32), Span(0, 32))
    target = make_world(state, 32, "CBTHD", 2)
    assert read_all(store, chain, target, Span(0, 31)) == {31}
    assert num_wrong(target, Span(0, 31)) == 0


def test_layers_with_a_window_take_what_their_tables_still_have(tmp_path):
    state = cut(windows=(0, 16, 0), tokens_per_block=8)
    store = PrefixStore(config_of(tmp_path), state)
    chain, source, target = store.chain(prompt(40)), full_world(state, 40), make_world(state, 40, "CBTHD", 2)
    assert {outcome.why for outcome in write_all(store, chain, source, Span(0, 40))} == {None}
    (caches,), full = target.caches.values(), target.tables(0).by_group
    holed = (full[0], (HOLE, HOLE, HOLE, *full[1][3:]))
    assert store.read(chain, Span(0, 40), caches, holed) == 40
    late = replace(caches, planes=caches.planes[2:4], groups=(), first_layer=1)
    expected = make_world(state, 40, "CBTHD", 2)
    whole, windowed = expected.caches[Rank(0)], late
    assert store.read(chain, Span(0, 40), whole, full) == 40
    for ours, theirs in zip(windowed.planes, whole.planes[2:4], strict=True):
        assert (ours[list(full[1][3:])] == theirs[list(full[1][3:])]).all()
        assert not (ours[list(full[1][:3])] == theirs[list(full[1][:3])]).any()
    assert num_wrong(expected, Span(0, 40)) == 0


def test_a_hole_is_not_written(tmp_path):
    state = cut()
    store, world = PrefixStore(config_of(tmp_path), state), full_world(state, 48)
    (caches,), (table,) = world.caches.values(), world.tables(0).by_group
    outcome = store.write(store.chain(prompt(48)), Span(0, 48), caches, [[BlockId(table[0]), HOLE, BlockId(table[2])]])
    assert (outcome.num_tokens, outcome.why) == (16, "hole")
    assert store.lookup(store.chain(prompt(48))) == 16


def test_callers_who_break_a_promise_are_told_and_nothing_is_written(tmp_path):
    state = cut()
    store, world = PrefixStore(config_of(tmp_path), state), full_world(state, 32)
    (caches,), tables = world.caches.values(), world.tables(0).by_group
    chain = store.chain(prompt(32))
    other = full_world(msgspec.structs.replace(state, dtype="bfloat16"), 32).caches[Rank(0)]
    for call in (store.read, store.write):
        for arguments in (
            (chain, Span(0, 33), caches, tables),
            (chain, Span(0, 32), caches, [tables[0][:1]]),
            (chain, Span(0, 32), caches, []),
            (chain, Span(0, 32), other, tables),
        ):
            with pytest.raises(ValueError):
                call(*arguments)
    with pytest.raises(ValueError, match="priority"):
        store.write(chain, Span(0, 32), caches, tables, priority=101)
    with pytest.raises(ValueError, match="other records"):
        store.lookup(PrefixStore(config_of(tmp_path, tokens_per_record=8), state).chain(prompt(32)))
    assert record_files(tmp_path / "store") == []
    assert misses(store, "read") == misses(store, "write") == {}
