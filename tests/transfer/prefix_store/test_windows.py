"""Layers with windows in the store: what they left behind is not written; no longer prefix is told than they serve."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.stores import config_of, cut, full_world, prompt, record_files
from kv_testing.tagged import make_world
from kv_transfer.plan.plan import kept_for_next
from kv_transfer.plan.ranges import HOLE
from kv_transfer.prefix_store.boxes import Box
from kv_transfer.prefix_store.store import PrefixStore

RECORD = 16


def rows(world, layer, tokens):
    """The bytes of these tokens of a layer, [C, T, H, D]."""
    caches = world.caches[Rank(0)]
    size, table = caches.tokens_per_block, world.tables(Rank(0)).by_group[caches.groups[layer] if caches.groups else 0]
    planes = caches.planes_of_layers(Span(layer, layer + 1))
    return torch.stack([torch.stack([plane[table[at // size], at % size] for at in tokens]) for plane in planes])


def holed(world, holes):
    """The tables of a world without some blocks, by group."""
    tables = world.tables(Rank(0)).by_group
    return [
        [HOLE if ordinal in holes.get(group, ()) else block for ordinal, block in enumerate(table)]
        for group, table in enumerate(tables)
    ]


def group_of(world, layer):
    groups = world.caches[Rank(0)].groups
    return groups[layer] if groups else 0


@pytest.fixture
def kept(tmp_path):
    """80 tokens whose middle layer lacks those from 16 to 40."""
    state = cut(windows=(0, 32, 0), tokens_per_block=8)
    store, world = PrefixStore(config_of(tmp_path), state), full_world(state, 80)
    outcome = store.write(
        store.chain(prompt(80)), Span(0, 80), world.caches[Rank(0)], holed(world, {group_of(world, 1): {2, 3, 4}})
    )
    assert (outcome.num_tokens, outcome.why) == (80, None)
    return store, world


def test_a_prompt_is_told_as_far_as_its_windows_serve_it(kept):
    store, _ = kept
    assert store.counts["hollow_records"] == 2
    assert store.lookup(store.chain(prompt(90))) == 80
    assert "lookup hole" not in store.counts
    assert store.lookup(store.chain(prompt(72))) == 16, "at 64 the window begins among what was left behind"
    assert store.counts["lookups_cut_by_windows"] == 1
    full = Box(Span(0, 1), Span(0, 4))
    assert store.lookup(store.chain(prompt(72)), full) == 64, "a rank that has no window"


def test_a_miss_for_want_of_windows_is_counted(tmp_path):
    state = cut(windows=(0, 32, 0), tokens_per_block=8)
    store, world = PrefixStore(config_of(tmp_path), state), full_world(state, 32)
    chain, group = store.chain(prompt(32)), group_of(world, 1)
    store.write(chain, Span(0, 32), world.caches[Rank(0)], holed(world, {group: range(4)}))
    assert store.lookup(chain) == 0
    assert store.counts["lookup hole"] == 1


def test_only_what_the_tables_ask_for_is_read(kept):
    store, source = kept
    target = make_world(cut(windows=(0, 32, 0), tokens_per_block=8), 80, "CBTHD", 2)
    group, chain = group_of(target, 1), store.chain(prompt(80))
    before = rows(target, 1, range(48)).clone()
    assert store.read(chain, Span(0, 80), target.caches[Rank(0)], holed(target, {group: range(6)})) == 80
    for layer in (0, 2):
        assert torch.equal(rows(target, layer, range(80)), rows(source, layer, range(80)))
    assert torch.equal(rows(target, 1, range(48, 80)), rows(source, 1, range(48, 80)))
    assert torch.equal(rows(target, 1, range(48)), before)
    assert store.read(chain, Span(0, 80), target.caches[Rank(0)], holed(target, {group: {1, 6}})) == 16


def test_a_table_with_holes_in_between_is_filled_beside_them(kept):
    store, source = kept
    target = make_world(cut(windows=(0, 32, 0), tokens_per_block=8), 80, "CBTHD", 2)
    before = rows(target, 1, range(80)).clone()
    holes = {group_of(target, 1): {*range(2, 7), 8}}
    assert store.read(store.chain(prompt(80)), Span(0, 80), target.caches[Rank(0)], holed(target, holes)) == 80
    for at in range(80):
        expected = before if at // 8 in holes[group_of(target, 1)] else rows(source, 1, range(80))
        assert torch.equal(rows(target, 1, [at])[:, 0], expected[:, at])


def test_a_hole_in_a_layer_that_sees_all_ends_a_write(tmp_path):
    state = cut(windows=(0, 32, 0), tokens_per_block=8)
    store, world = PrefixStore(config_of(tmp_path), state), full_world(state, 48)
    holes = holed(world, {group_of(world, 0): {3}})
    outcome = store.write(store.chain(prompt(48)), Span(0, 48), world.caches[Rank(0)], holes)
    assert (outcome.num_tokens, outcome.why) == (16, "hole")


def test_what_was_hollow_is_made_whole_by_a_later_write(kept):
    store, world = kept
    chain = store.chain(prompt(80))
    before = len(record_files(store._holdings.shelf.namespace.parent))
    store.write(chain, Span(0, 80), world.caches[Rank(0)], world.tables(Rank(0)).by_group)
    assert store.lookup(store.chain(prompt(72))) == 64
    assert len(record_files(store._holdings.shelf.namespace.parent)) == before + 2


def test_a_model_of_windows_alone_needs_its_last_window_alone(tmp_path):
    state = cut(windows=(32, 32, 32), tokens_per_block=8)
    store, world = PrefixStore(config_of(tmp_path), state), full_world(state, 90)
    store.write(store.chain(prompt(90)), Span(0, 90), world.caches[Rank(0)], holed(world, {0: range(6)}))
    assert store.lookup(store.chain(prompt(95))) == 90
    assert store.lookup(store.chain(prompt(89))) == 80
    assert store.lookup(store.chain(prompt(79))) == 0
    target = make_world(state, 90, "CBTHD", 2)
    assert store.read(store.chain(prompt(90)), Span(0, 90), target.caches[Rank(0)], holed(target, {0: range(7)})) == 90
    assert torch.equal(rows(target, 1, range(56, 90)), rows(world, 1, range(56, 90)))


@settings(max_examples=60)
@given(st.data())
def test_what_is_told_is_served(tmp_path_factory, data):
    """Several prompts' ends, holes anywhere: what is told can be read, and no longer end of a record could be."""
    chunked = data.draw(st.booleans())
    windows = data.draw(st.sampled_from(((0, 16, 0), (24, 24, 24), (0, 16, 40), (40, 0, 16))))
    size = data.draw(st.sampled_from((4, 8, 16)))
    state = cut(windows=windows, tokens_per_block=size, chunked=chunked)
    store = PrefixStore(config_of(tmp_path_factory.mktemp("drawn"), tokens_per_record=RECORD), state)
    world = full_world(state, 96)
    caches, groups = world.caches[Rank(0)], {group_of(world, layer): windows[layer] for layer in range(3)}
    ends = data.draw(st.lists(st.integers(1, 96), min_size=1, max_size=3))
    for end in ends:
        holes = {
            group: data.draw(st.sets(st.integers(0, 96 // size - 1), max_size=6))
            for group, window in groups.items() if window
        }  # fmt: skip
        store.write(store.chain(prompt(end)), Span(0, end), caches, holed(world, holes))
    asked = data.draw(st.integers(1, 96))
    chain = store.chain(prompt(asked))

    def reads(stop):
        target = make_world(state, 96, "CBTHD", 2)
        holes = {
            group: range(kept_for_next(Span(0, stop), window, state).start // size)
            for group, window in groups.items() if window
        }  # fmt: skip
        if store.read(chain, Span(0, stop), target.caches[Rank(0)], holed(target, holes)) != stop:
            return False
        for layer in range(3):
            seen = kept_for_next(Span(0, stop), windows[layer], state)
            if seen:
                assert torch.equal(rows(target, layer, seen), rows(world, layer, seen))
        return True

    num_held = store.lookup(chain)
    assert not num_held or reads(num_held)
    whole = [stop for stop in range(RECORD, asked + 1, RECORD) if stop > num_held]
    assert not any(map(reads, whole))


def test_ranks_of_other_layers_serve_a_window_together(tmp_path):
    state = cut(windows=(0, 32, 0), stages=(1, 2), tokens_per_block=8)
    store, world = PrefixStore(config_of(tmp_path), state), full_world(state, 80)
    chain = store.chain(prompt(80))
    for rank, caches in world.caches.items():
        assert store.write(chain, Span(0, 80), caches, world.tables(rank).by_group).num_tokens == 80
    one = cut(windows=(0, 32, 0), tokens_per_block=16)
    reader = PrefixStore(config_of(tmp_path), one)
    assert reader.lookup(reader.chain(prompt(80))) == 80
