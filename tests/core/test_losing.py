"""Blocks whose bytes are lost are not found any more, and whoever holds one starts again."""

import pytest

from kv_core.config import ManagerConfig, WindowConfig
from kv_core.errors import CallerError
from kv_core.events import Removed
from kv_core.ids import RequestId
from kv_core.manager import KVCacheManager
from kv_core.request import Request
from kv_core.tiers import Place, Tier

FULL, SLIDING = 64, 8
A, B = RequestId("a"), RequestId("b")
TOKENS = tuple(range(17))


def make(*windows, **options):
    return KVCacheManager(
        ManagerConfig(tokens_per_block=4, windows=windows, max_sequence_length=FULL, event_buffer_size=100, **options)
    )


def store(manager, tokens, name="stored"):
    assert manager.add(Request(RequestId(name), tokens)) is not None
    manager.release(RequestId(name), num_filled=len(tokens) - 1)


def pushed_down():
    """A manager whose device blocks have all gone to the host, and been claimed again by request a."""
    manager = make(WindowConfig(FULL, 5, 8, 8))
    store(manager, TOKENS)
    store(manager, tuple(range(100, 117)), "other")
    manager.take_copies()
    admission = manager.add(Request(A, TOKENS))
    assert admission is not None
    assert admission.num_cached == 16
    return manager, [order for order in manager.take_copies() if order.destination.tier == Tier.DEVICE]


def test_who_holds_a_lost_block_ends_and_what_follows_it_is_not_found():
    manager, orders = pushed_down()
    manager.take_events()
    table = manager.slots(A, FULL)
    second = next(order.destination for order in orders if order.destination.slot == table[1])
    assert manager.lost([second]) == (A,)
    manager.check()
    assert manager.probe(Request(B, TOKENS)).num_cached == 4
    assert manager.num_free(FULL) == 5
    manager.flush_events()
    removed = [event.payload for event in manager.take_events() if isinstance(event.payload, Removed)]
    assert sum(len(payload.keys) for payload in removed) == 3
    assert manager.add(Request(A, TOKENS)) is not None
    manager.check()


def test_who_holds_none_goes_on():
    manager, orders = pushed_down()
    manager.release(A)
    assert manager.add(Request(B, TOKENS[:5])) is not None
    assert manager.lost([orders[-1].destination]) == ()
    manager.check()
    assert manager.num_tokens(B) == 5
    assert manager.probe(Request(A, TOKENS)).num_cached < 16


def test_a_lost_block_on_a_lower_tier_takes_what_follows_it_along():
    manager = make(WindowConfig(FULL, 5, 8, 8))
    store(manager, TOKENS)
    store(manager, tuple(range(100, 117)), "other")
    host = {order.source: order.destination for order in manager.take_copies()}
    lookup = manager.lookup(Request(A, TOKENS[:16]), FULL)
    assert manager.lost([next(iter(host.values()))]) == ()
    manager.check()
    assert manager.probe(Request(A, TOKENS)).num_cached < 16
    assert lookup.num_tokens == 16


def test_a_sliding_window_does_without_a_block_that_it_does_not_need():
    manager = make(WindowConfig(SLIDING, 12, 4))
    store(manager, TOKENS)
    first, *_ = manager.lookup(Request(A, TOKENS[:16]), SLIDING).block_ids
    slot = manager.inspect(SLIDING, first).slot
    assert manager.lost([Place(SLIDING, Tier.DEVICE, slot)]) == ()
    manager.check()
    assert manager.probe(Request(A, TOKENS)).num_cached == 16
    assert manager.probe(Request(A, TOKENS[:9])).num_cached == 0


def test_a_private_block_is_nobody_elses():
    manager = make(WindowConfig(FULL, 10))
    assert manager.add(Request(A, TOKENS)) is not None
    assert manager.add(Request(B, TOKENS)) is not None
    slot = manager.slots(B, FULL)[-1]
    assert slot is not None
    assert manager.lost([Place(FULL, Tier.DEVICE, slot)]) == (B,)
    manager.check()
    assert manager.num_tokens(A) == 17


def test_beams_lose_their_own_blocks_too():
    manager = make(WindowConfig(FULL, 20), max_beam_width=3)
    assert manager.add(Request(A, TOKENS), beam_width=3) is not None
    slot = manager.slots(A, FULL, 2)[-1]
    assert slot is not None
    assert manager.lost([Place(FULL, Tier.DEVICE, slot)]) == (A,)
    manager.check()
    assert manager.num_free(FULL) == 20


def test_empty_places_are_nothing_to_lose():
    manager = make(WindowConfig(FULL, 5, 8))
    assert manager.lost([Place(FULL, Tier.HOST, 3), Place(FULL, Tier.DEVICE, 2)]) == ()
    assert manager.lost([]) == ()
    manager.check()


def test_what_cannot_be_lost_changes_nothing():
    manager, orders = pushed_down()
    pin = manager.pin(A)
    with pytest.raises(CallerError, match="pin"):
        manager.lost([orders[0].destination])
    with pytest.raises(CallerError, match="no such place"):
        manager.lost([Place(FULL, Tier.HOST, 8)])
    with pytest.raises(CallerError, match="no such window"):
        manager.lost([Place(7, Tier.HOST, 0)])
    manager.check()
    assert manager.num_tokens(A) == 17
    manager.unpin(pin)
    assert manager.lost([orders[0].destination]) == (A,)
    manager.check()
