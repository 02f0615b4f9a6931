"""What the manager answers, beyond defects and random play: external caches, chunks, tables, statistics, ranks."""

import pytest

from kv_core.config import CacheType, ManagerConfig, WindowConfig
from kv_core.errors import CallerError, CapacityError
from kv_core.event_log import EventLog, merged
from kv_core.events import Event, Removed, Reset
from kv_core.ids import RequestId
from kv_core.keys import Scope, block_keys
from kv_core.layout import cache_pools
from kv_core.page_tables import NO_PAGE, page_table
from kv_core.request import Request, context_chunk
from kv_core.spec import CacheSpec
from kv_testing.managers import found, manager, request, run

A = range(100, 164)


class Elsewhere:
    """An external cache that always has `num_tokens` more."""

    def __init__(self, num_tokens):
        self.num_tokens = num_tokens
        self.asked = []

    def num_matched_tokens(self, request, num_cached):
        self.asked.append((request.request_id, num_cached))
        return self.num_tokens


@pytest.mark.parametrize(
    ("prepopulated", "chunk", "expected"),
    [(70, 128, (70, 122)), (32, 128, (32, 128)), (0, 100, (0, 100)), (990, 128, (990, 10))],
)
def test_the_first_chunk_ends_on_a_block(prepopulated, chunk, expected):
    assert context_chunk(prepopulated, chunk, 1000, 32) == expected


@pytest.mark.parametrize(("prepopulated", "chunk"), [(1000, 128), (-1, 128), (70, 20)])
def test_chunks_that_cannot_be(prepopulated, chunk):
    with pytest.raises(CallerError):
        context_chunk(prepopulated, chunk, 1000, 32)


def test_what_another_cache_supplies_is_added_once_over_all_windows():
    elsewhere = Elsewhere(4)
    ours = manager(16, windows=(8, 64), external=elsewhere)
    admission = ours.add(request("a", A[:13]))
    assert (admission.num_cached, admission.num_external, admission.num_prepopulated) == (0, 4, 4)
    assert elsewhere.asked == [("a", 0)]
    ours.release("a")
    assert ours.add(request("b", A[:13])).num_prepopulated == 12, "at least one token is left to compute"
    assert ours.stats().num_external_tokens == 4


def test_dummies_and_requests_without_tokens_ask_nobody_and_store_nothing():
    elsewhere = Elsewhere(4)
    ours = manager(16, external=elsewhere)
    ours.add(request("a", A[:13], is_dummy=True))
    ours.add(Request("b", None, num_tokens=13))
    ours.release("a")
    ours.release("b")
    assert elsewhere.asked == []
    assert found(ours, A[:13]) == 0


def test_an_error_of_the_other_cache_changes_nothing():
    class Broken:
        def num_matched_tokens(self, request, num_cached):
            raise OSError("gone")

    ours = manager(16, external=Broken())
    for call in (lambda: ours.add(request("a", A[:9])), lambda: ours.add_all([request("a", A[:9]), request("b", A)])):
        with pytest.raises(OSError, match="gone"):
            call()
        assert ours.num_free() == 16
        assert ours.real._registry.windows[0].tree.roots == {}


def test_unknown_names_are_refused():
    ours = manager(8)
    ours.add(request("a", A[:5]))
    for call in (
        lambda: ours.add(request("a", A[:5])),
        lambda: ours.add_all([request("b", A[:5]), request("b", A[:5])]),
        lambda: ours.add(request("c", A[:5]), beam_width=2),
        lambda: ours.grow("x"),
        lambda: ours.grow("a", 0),
        lambda: ours.rewind("a", 5),
        lambda: ours.release("x"),
        lambda: ours.block_ids("a", 63),
        lambda: ours.block_ids("a", 64, 1),
        lambda: ours.inspect(64, 8),
        lambda: ours.set_priority(64, 0, 101),
    ):
        with pytest.raises(CallerError):
            call()
    assert ours.num_free() == 6
    assert len(ours.block_ids("a", 64)) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_per_block": 0},
        {"windows": ()},
        {"windows": (WindowConfig(8, 1), WindowConfig(8, 1))},
        {"windows": (WindowConfig(9, 1), WindowConfig(8, 1))},
        {"max_sequence_length": 0},
        {"max_beam_width": 0},
        {"max_rewind": -1},
        {"event_buffer_size": -1},
        {"rank": 1},
        {"num_ranks": 2},
        {"rank": 2, "num_ranks": 2},
    ],
)
def test_configurations_that_cannot_be(change):
    fine = {"tokens_per_block": 4, "windows": (WindowConfig(8, 4),), "max_sequence_length": 8}
    ManagerConfig(**fine)
    with pytest.raises(CallerError):
        ManagerConfig(**fine | change)


@pytest.mark.parametrize("blocks", [(0, 4), (4, -1), (4, 0, 4)])
def test_windows_that_cannot_be(blocks):
    with pytest.raises(CallerError):
        WindowConfig(8, *blocks)


def test_keys_are_those_of_the_tokens_and_grow_with_them():
    ours = manager(16)
    scope = Scope("l", "s", ((b"picture", 5),))
    ours.add(request("a", A[:10], lora="l", salt="s", items=[(b"picture", 5)]))
    assert ours.block_keys("a") == block_keys(A[:10], scope, 4)
    ours.extend("a", A[10:13])
    assert ours.block_keys("a") == block_keys(A[:13], scope, 4)
    ours.grow("a", 3)
    ours.rewind("a", 6)
    assert ours.block_keys("a") == block_keys(A[:7], scope, 4)


def test_page_tables_are_found_by_request_and_filled_with_nothing():
    ours = manager(16, windows=(8, 64), max_beam_width=2)
    spec = CacheSpec.uniform(
        num_layers=6, num_heads=2, head_size=8, dtype="float16", tokens_per_block=4, windows=(8, 8, None)
    )
    small, large = cache_pools(spec)
    ours.add(request("a", A[:9]))
    for _ in range(4):
        assert ours.grow("a")
    table = page_table(ours, [RequestId("a")], 8, small)
    [(keys, values)] = table.rows
    assert list(keys) == [NO_PAGE, 8, 16, 24] + [NO_PAGE] * 12
    assert [value - key for key, value in zip(keys, values, strict=True) if key != NO_PAGE] == [1, 1, 1]
    ours.add(request("b", A[20:25]), beam_width=2)
    both = page_table(ours, [RequestId("b"), RequestId("a")], 64, large)
    assert both.owners == (("b", 0), ("b", 1), ("a", 0))
    assert both.num_blocks == 4
    assert both.rows[0][0][0] == both.rows[1][0][0] != both.rows[2][0][0]
    assert both.rows[0][0][1] != both.rows[1][0][1]


def test_a_cross_cache_shares_all_blocks_among_beams():
    ours = manager(8, cache_type=CacheType.CROSS, max_beam_width=3)
    ours.add(request("a", A[:9]), beam_width=3)
    assert ours.block_ids("a", 64, 0) == ours.block_ids("a", 64, 2)
    assert ours.num_free() == 5


def test_without_reuse_nothing_is_found_and_nothing_counted_as_missed():
    ours = manager(8, reuse=False)
    run(ours, "a", A[:9])
    assert run(ours, "b", A[:9]) == 0
    assert ours.stats().block_hit_rate == 0.0
    assert ours.stats().windows[0].num_missed == 0


def test_statistics_of_a_request_and_of_all():
    ours = manager(16, windows=(8, 64))
    first = ours.add(request("a", A[:9])).stats
    assert (first.allocated, first.fresh, first.reused, first.missed, first.hit_rate) == (6, 6, 0, 6, 0.0)
    ours.release("a")
    second = ours.add(request("b", A[:9])).stats
    assert (second.allocated, second.reused, second.missed) == (2, 4, 2)
    assert second.hit_rate == pytest.approx(2 / 3)


def test_a_sliding_window_smaller_than_the_prompt_admits_what_is_cached_and_refuses_what_can_never_fit():
    ours = manager(6, windows=(8,))
    with pytest.raises(CapacityError, match="ours=6, theirs=8"):
        ours.add(request("a", A[:29]))
    assert ours.num_free() == 6


def test_the_streams_of_ranks_become_one():
    mine, yours = [Event(at, 64, Removed(())) for at in range(3)], [Event(0, 64, Removed(()))]
    stream = merged([mine, yours], max_size=2)
    assert [(event.event_id, event.rank, type(event.payload)) for event in stream] == [
        (1, 0, Reset),
        (1, 0, Removed),
        (2, 0, Removed),
        (0, 1, Removed),
    ]


def test_events_name_their_rank():
    log = EventLog(4, rank=1)
    log.created(64, (8,))
    log.flush()
    assert [event.rank for event in log.take(0)] == [1]


@pytest.mark.parametrize("amount", [1, 2, 9, 20])
def test_a_growth_of_any_length_keeps_what_its_first_token_reads(amount):
    ours = manager(16, windows=(6,))
    ours.add(request("a", range(100, 111)))
    assert ours.grow("a", amount)
    table = ours.block_ids("a", 6)
    # The token at position 11 reads the positions 6 to 11: blocks 1 and 2. Block 0 is not read any more.
    assert [block_id is None for block_id in table[:3]] == [True, False, False]
    assert len(table) == -(-(11 + amount) // 4)
    assert all(block_id is not None for block_id in table[1:])
    assert ours.grow("a", 1)


def test_a_growth_beyond_the_window_of_a_short_request_has_all_its_blocks():
    ours = manager(16, windows=(5,))
    ours.add(request("a", [1]))
    ours.set_priority(5, ours.block_ids("a", 5)[0], 5)
    assert ours.grow("a", 20)
    assert None not in ours.block_ids("a", 5)
    ours.release("a")
    assert ours.num_free() == 16
