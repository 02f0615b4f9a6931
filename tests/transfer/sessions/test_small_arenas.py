"""Memory bounds transfers, never stops them: arenas smaller than one transfer, of one chunk, shared by many."""

from dataclasses import replace

import pytest

from kv_core.errors import CallerError
from kv_core.spans import Span
from kv_testing.worlds import FAST, pair, state_of
from kv_transfer.config import ConfigError, TransferConfig

ONE = replace(FAST, send_arena_bytes=4096, receive_arena_bytes=4096)
"""Room for one chunk: regions are a granule of 4096 bytes at least."""


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [(ONE, ONE), (ONE, FAST), (FAST, ONE), (replace(FAST, send_arena_bytes=3 * 4096), ONE)],
    ids=["one-one", "one-many", "many-one", "three-one"],
)
def test_arenas_smaller_than_a_transfer(sender, receiver):
    with pair(state_of(2), state_of(1), config=receiver, prefill_config=sender) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        received = d.outcome(others=[p])
        assert received.ok, received.reason
        assert received.num_chunks > 4
        assert d.misplaced() == 0
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()


@pytest.mark.parametrize("spare", [0, -4096, 4096])
def test_arenas_of_one_target_and_a_granule_less_or_more(spare):
    """With room for all that one rank gives another it is one chunk; the second request waits for the first."""
    state, tokens = state_of(1), Span(0, 32)
    target = len(tokens) * 4 * 4 * 2 * state.bytes_per_token_head
    assert target == 16384, "law: arenas lend powers of two"
    room = target + spare
    config = replace(FAST, chunk_bytes=room, send_arena_bytes=room, receive_arena_bytes=room)
    with pair(state, state, config=config) as (p, d, _):
        for number, transfer in enumerate([p.offer("p0"), p.offer("p1")]):
            d.order(p, transfer, f"d{number}", tokens)
        for number in range(2):
            received = d.outcome(f"d{number}", others=[p])
            assert received.ok, received.reason
            assert received.num_bytes == target
            assert (received.num_chunks == 1) == (spare >= 0)
        assert d.misplaced(tokens) == 0
        for number in range(2):
            p.withdraw(f"p{number}")


def test_two_orders_in_opposite_order_with_one_region_each():
    """The deadlock of a receiver that takes memory before the sender is ready (transfer spec 7.9, defect D10)."""
    with pair(state_of(2), state_of(2), config=ONE) as (p, d, _):
        a, b = p.offer("a"), p.offer("b")
        d.order(p, a, "da", only_ranks=[0])
        d.order(p, b, "db", only_ranks=[1])
        d.order(p, b, "db", only_ranks=[0])
        d.order(p, a, "da", only_ranks=[1])
        assert d.outcome("da", others=[p]).ok
        assert d.outcome("db", others=[p]).ok
        d.release(p, a, "da")
        d.release(p, b, "db")
        d.check_clean()
        p.check_clean()


def test_many_transfers_through_one_region():
    with pair(state_of(2), state_of(1), config=ONE) as (p, d, _):
        transfers = [p.offer(f"p{number}") for number in range(8)]
        for number, transfer in enumerate(transfers):
            d.order(p, transfer, f"d{number}")
        for number, transfer in enumerate(transfers):
            assert d.outcome(f"d{number}", others=[p]).ok
            d.release(p, transfer, f"d{number}")
        assert d.misplaced() == 0
        d.check_clean()
        p.check_clean()


def test_memory_is_asked_for_only_after_ready():
    """An ask that waits for its offer holds no staging, so those that can run do."""
    with pair(config=ONE) as (p, d, _):
        d.order(p, "0" * 32, "waits")
        transfer = p.offer("p1")
        d.order(p, transfer, "runs")
        assert d.outcome("runs", others=[p]).ok
        assert d.receive_arena().num_leases == 0
        d.abort("waits")
        assert not d.outcome("waits", others=[p]).ok
        d.release(p, transfer, "runs")
        d.check_clean()
        p.check_clean()


def test_both_sides_use_the_smaller_chunk():
    with pair(config=replace(FAST, chunk_bytes=512), prefill_config=replace(FAST, chunk_bytes=2048)) as (p, d, _):
        d.order(p, p.offer())
        first = d.outcome(others=[p])
        assert first.ok
        assert first.num_bytes / first.num_chunks <= 512
    with pair(config=replace(FAST, chunk_bytes=2048), prefill_config=replace(FAST, chunk_bytes=512)) as (p, d, _):
        d.order(p, p.offer())
        assert d.outcome(others=[p]).num_chunks == first.num_chunks


def test_a_unit_larger_than_a_chunk_fails_the_load_with_both_sizes():
    with pair(config=replace(FAST, chunk_bytes=64)) as (p, d, _):
        d.order(p, p.offer())
        received = d.outcome(others=[p])
        assert not received.ok
        assert "unit=128 bytes, max_bytes=64" in received.reason


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"receive_arena_bytes": 1024, "chunk_bytes": 4096}, "receive_arena_bytes"),
        ({"send_arena_bytes": 1024, "chunk_bytes": 4096}, "send_arena_bytes"),
        ({"port": 70_000}, "port"),
        ({"bind_host": "0.0.0.0"}, "advertised_host"),
        ({"advertised_host": "::"}, "advertised_host"),
        ({"lease_s": 0.0}, "lease_s"),
        ({"chunks_in_flight": 0}, "chunks_in_flight"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings, named):
    with pytest.raises(ConfigError, match=named) as caught:
        TransferConfig(**settings)
    assert isinstance(caught.value, CallerError)
