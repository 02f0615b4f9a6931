"""The worker side of the tiers over real tensors: what comes back is what was there, and failures are answers."""

import threading

import pytest

from kv_core.errors import CallerError
from kv_core.ids import Rank, RequestId
from kv_core.spans import Span
from kv_engine_adapter.tier_memory import HostMemory
from kv_engine_adapter.tier_orders import (
    Answer,
    JobId,
    LoadTokens,
    SaveBlocks,
    TierOrders,
)
from kv_engine_adapter.tier_worker import TierWorker
from kv_testing.stores import cut, full_world, num_wrong
from kv_testing.tagged import FORMS
from kv_testing.tier_side import NUM_TOKENS, SIZE, SLOTS, load, making_sides, save, wipe
from kv_testing.waiting import wait_for
from kv_transfer.plan.cache_state import BlockLayout


@pytest.fixture
def sides():
    with making_sides() as make:
        yield make


@pytest.mark.parametrize(("order", "form"), [(order, form) for order, forms in FORMS.items() for form in forms])
@pytest.mark.parametrize("tokens", [Span(0, NUM_TOKENS), Span(0, 64), Span(16, 70), Span(5, 6), Span(30, 75)])
def test_what_is_loaded_is_what_was_saved_and_nothing_else_is_written(sides, order, form, tokens):
    side = sides(full_world(cut(order=order), NUM_TOKENS, form))
    assert side.obey(save(side)) == [Answer(1, NUM_TOKENS)]
    wipe(side)
    assert side.obey(load(side, tokens=tokens)) == [Answer(2, tokens.stop)]
    assert (side.received, side.failed) == ({"r"}, set())
    assert num_wrong(side.world, tokens) == 0


def test_latent_rows_are_kept_too(sides):
    state = cut(attention="latent", num_kv_heads=1, num_planes=1)
    side = sides(full_world(state, NUM_TOKENS, "BTD"))
    side.obey(save(side))
    wipe(side)
    side.obey(load(side))
    assert num_wrong(side.world, Span(0, NUM_TOKENS)) == 0


def test_smaller_tensor_blocks_than_slots(sides):
    side = sides(full_world(cut(tokens_per_block=8), NUM_TOKENS + 5))
    side.obey(save(side))
    wipe(side)
    side.obey(load(side))
    assert num_wrong(side.world, Span(0, NUM_TOKENS)) == 0


def test_jobs_are_obeyed_in_order(sides):
    """A slot that is loaded and then saved into gives what it held before."""
    side = sides(full_world(cut(), NUM_TOKENS))
    side.obey(save(side))
    wipe(side)
    other = SaveBlocks(JobId(3), Span(0, 16), (SLOTS[1],), ((side.tables[0][-1],),), 60.0)
    side.worker.run(TierOrders((load(side),)))
    side.worker.run(TierOrders((other,)))
    wait_for(lambda: side.look() == 3)
    assert [answer.job for answer in side.answers] == [1, 2, 3]
    assert num_wrong(side.world, Span(0, NUM_TOKENS)) == 0


@pytest.mark.parametrize("make", [save, load])
def test_what_comes_too_late_fails(sides, make):
    side = sides(full_world(cut(), NUM_TOKENS))
    assert side.obey(make(side, 5, within_s=-1.0)) == [Answer(5, 0)]
    assert side.failed == ({"r"} if make is load else set())
    assert num_wrong(side.world, Span(0, NUM_TOKENS)) == 0


def test_it_is_told_when_what_a_prompt_waits_for_is_over(sides):
    side, told, go = sides(full_world(cut(), NUM_TOKENS)), threading.Semaphore(0), threading.Event()

    def when_told(tables):
        go.wait(10)
        return tables

    worker = TierWorker(side.memory, when_told, on_news=told.release)
    try:
        worker.run(TierOrders((save(side),)))
        awaited = [worker.is_awaited]
        worker.run(TierOrders((load(side),)))
        awaited.append(worker.is_awaited)
        go.set()
        assert all(told.acquire(timeout=10) for _ in range(2))
        awaited.append(worker.is_awaited)
        assert awaited == [False, True, False], "nobody waits for a save"
        assert worker.poll().received == {"r"}
    finally:
        go.set()
        worker.close()


def test_a_broken_order_is_a_failure_and_the_thread_goes_on(sides, caplog):
    side = sides(full_world(cut(), NUM_TOKENS))
    assert side.obey(LoadTokens(JobId(4), RequestId("r"), Span(0, 64), SLOTS[:4], ((0,),), 60.0)) == [Answer(4, 0)]
    assert side.failed == {"r"}
    assert "load failed" in caplog.text
    assert side.obey(save(side)) == [Answer(1, NUM_TOKENS)]


@pytest.mark.parametrize("verify", [True, False])
def test_damage_in_host_memory_is_seen_if_one_looks(sides, verify):
    side = sides(full_world(cut(), NUM_TOKENS), verify=verify)
    side.obey(save(side))
    side.memory.caches.planes[3][SLOTS[2], 5, 1, 2] += 1
    wipe(side)
    (told,) = side.obey(load(side))
    assert told.num_tokens == (0 if verify else NUM_TOKENS)
    assert side.failed == ({"r"} if verify else set())
    nothing = Span(0, 0)
    assert num_wrong(side.world, nothing if verify else Span(0, NUM_TOKENS)) == (0 if verify else 1)


@pytest.mark.parametrize(("state", "why"), [
    (cut(layout=BlockLayout("head_major", "tile")), "plain blocks"),
])  # fmt: skip
def test_what_is_not_kept_is_refused(state, why):
    caches = full_world(cut(), NUM_TOKENS).caches[Rank(0)]
    with pytest.raises(CallerError, match=why):
        HostMemory(state, caches, SIZE, 10)
