"""The worker side of the tiers over real tensors: what comes back is what was there, and failures are answers."""

import errno
import threading
import time

import pytest
import torch

from kv_core.errors import CallerError
from kv_core.ids import Rank, RequestId
from kv_core.keys import Scope
from kv_core.spans import Span
from kv_core.token_log import packed
from kv_engine_adapter import metrics
from kv_engine_adapter.tier_memory import HostMemory
from kv_engine_adapter.tier_orders import (
    Answer,
    FetchFromDisk,
    FindOnDisk,
    JobId,
    LoadTokens,
    Prefix,
    Rates,
    SaveBlocks,
    TierOrders,
    Wish,
    WriteToDisk,
    slowest,
)
from kv_engine_adapter.tier_worker import TierWorker, by_record
from kv_testing.stores import config_of, cut, full_world, num_wrong
from kv_testing.tagged import FILLER, FORMS, make_world
from kv_testing.waiting import wait_for
from kv_transfer.file_mover import FileCalls, PlainFiles
from kv_transfer.plan.cache_state import BlockLayout
from kv_transfer.prefix_store.store import PrefixStore

SIZE = 16
NUM_TOKENS = 75
SLOTS = (7, 2, 9, 4, 0)
ALL = Span(0, NUM_TOKENS)
PREFIX = Prefix(packed(range(NUM_TOKENS)), Scope())
WISHES = (Wish(Span(0, 32), 90, 60_000), Wish(Span(32, NUM_TOKENS), 35))


class Side:
    """A rank, its tiers and what it answered so far."""

    def __init__(self, world, rank=0, store=None, num_slots=10, measured=(), clock=time.monotonic, **more):
        self.world = world
        self.caches = world.caches[Rank(rank)]
        self.memory = HostMemory(world.state, self.caches, SIZE, num_slots, **more)
        self.worker = TierWorker(self.memory, lambda tables: tables, store, clock=clock, measured=measured)
        self.tables = world.tables(Rank(rank)).by_group
        self.answers, self.received, self.failed = [], set(), set()
        self.rates = Rates()

    def obey(self, *jobs):
        """Wait for the answers to all of these."""
        expected = len(self.answers) + len(jobs) + sum(getattr(job, "write", None) is not None for job in jobs)
        self.worker.run(TierOrders(jobs))
        wait_for(lambda: self.look() >= expected)
        return self.answers[expected - len(jobs) :]

    def look(self):
        ended = self.worker.poll()
        self.answers += ended.answers
        self.received |= ended.received
        self.failed |= ended.failed
        self.rates = slowest(self.rates, ended.rates or Rates())
        return len(self.answers)


@pytest.fixture
def sides():
    made = []

    def make(*args, **more):
        made.append(Side(*args, **more))
        return made[-1]

    yield make
    for side in made:
        side.worker.close()


def save(side, job=1, tokens=ALL, write=None, within_s=60.0):
    slots = SLOTS[tokens.start // SIZE :]
    return SaveBlocks(JobId(job), tokens, slots, side.tables, within_s, write)


def load(side, job=2, tokens=ALL, within_s=60.0):
    blocks = tokens.blocks(SIZE)
    return LoadTokens(JobId(job), RequestId("r"), tokens, SLOTS[blocks.start : blocks.stop], side.tables, within_s)


def write(job=3, wishes=WISHES):
    return WriteToDisk(JobId(job), PREFIX, SLOTS, wishes)


def wipe(side):
    filler = torch.full((8,), FILLER, dtype=torch.uint8)
    for plane in side.caches.planes:
        plane.fill_(filler.view(plane.dtype)[0])


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
    (cut(windows=(0, 32, 0)), "see all tokens"),
])  # fmt: skip
def test_what_is_not_kept_is_refused(state, why):
    caches = full_world(cut(), NUM_TOKENS).caches[Rank(0)]
    with pytest.raises(CallerError, match=why):
        HostMemory(state, caches, SIZE, 10)


class Ticking(threading.local):
    """A clock that every thread turns by itself, a second each time it looks."""

    now = 0

    def __call__(self):
        self.now += 1
        return self.now


def test_copies_are_measured_at_the_start(sides, tmp_path):
    world = full_world(cut(), NUM_TOKENS)
    store = PrefixStore(config_of(tmp_path, tokens_per_record=64), world.state)
    side = sides(world, store=store, measured=((3,),), clock=Ticking())
    wait_for(lambda: side.look() == 0 and None not in side.rates)
    assert side.rates == Rates(1 / SIZE, 1 / 64)
    assert num_wrong(world, ALL) == 0
    assert not list(tmp_path.rglob("l0-3.*"))
    side.rates = Rates()
    side.look()
    assert side.rates == Rates(), "told once"


def test_a_disk_that_fails_is_not_measured(sides, tmp_path):
    world = full_world(cut(), NUM_TOKENS)
    store = PrefixStore(config_of(tmp_path), world.state, mover=PlainFiles(FileCalls(write=full)))
    side = sides(world, store=store, measured=((3,),), clock=Ticking())
    wait_for(lambda: side.look() == 0 and "measure disk_full" in store.counts and side.rates.host_token_s)
    assert side.rates == Rates(1 / SIZE, None)
    assert not list(tmp_path.rglob("l0-3.*"))


# Disk.


def test_from_the_device_to_disk_and_back_through_another_cut_of_the_model(sides, tmp_path):
    """Written at TP 2 by an engine with 16-token blocks of one form, read at TP 1 with another."""
    config = config_of(tmp_path, tokens_per_record=64)
    for rank in (0, 1):
        world = full_world(cut(tp=2), NUM_TOKENS)
        side = sides(world, rank, PrefixStore(config, world.state))
        side.obey(save(side, write=write()))
        assert {Answer(1, NUM_TOKENS), Answer(3, NUM_TOKENS)} == set(side.answers)
    state = cut(order="head_major", tokens_per_block=8)
    world = make_world(state, NUM_TOKENS, "BHT(CD)", seed=3)
    reader = sides(world, 0, PrefixStore(config, state), verify=True)
    assert reader.obey(FindOnDisk(JobId(1), PREFIX, 60.0)) == [Answer(1, NUM_TOKENS)]
    fetch = FetchFromDisk(JobId(4), PREFIX, Span(16, NUM_TOKENS), SLOTS, 60.0)
    assert reader.obey(fetch) == [Answer(4, NUM_TOKENS)]
    reader.obey(load(reader, tokens=Span(16, NUM_TOKENS)))
    assert not reader.failed
    assert num_wrong(world, Span(16, NUM_TOKENS)) == 0


def test_wishes_are_written_with_the_records(sides, tmp_path):
    world = full_world(cut(), NUM_TOKENS)
    side = sides(world, 0, PrefixStore(config_of(tmp_path), world.state))
    side.obey(save(side, write=write()))
    names = sorted(path.name.split(".")[2:] for path in tmp_path.rglob("l0-3.*"))
    assert [name[:2] for name in names] == [["t11", "p35"], *[["t16", "p35"]] * 2, *[["t16", "p90"]] * 2]
    assert all((name[2] != "x0") == (name[1] == "p90") for name in names)


@pytest.mark.parametrize(("prompt_end", "found"), [(0, 64), (64, 64), (70, 70), (75, 64)])
def test_a_prompt_that_comes_again_finds_its_end_within_a_record(sides, tmp_path, prompt_end, found):
    world = full_world(cut(), NUM_TOKENS)
    store = PrefixStore(config_of(tmp_path, tokens_per_record=32), world.state)
    side = sides(world, 0, store)
    side.obey(save(side, write=WriteToDisk(JobId(3), PREFIX, SLOTS, WISHES, prompt_end)))
    assert set(side.answers) == {Answer(1, NUM_TOKENS), Answer(3, NUM_TOKENS)}
    for num_tokens, expected in ((70, found), (NUM_TOKENS, NUM_TOKENS)):
        prefix = Prefix(packed(range(num_tokens)), Scope())
        (told,) = side.obey(FindOnDisk(JobId(5), prefix, 60.0))
        assert told.num_tokens == expected
        fetch = FetchFromDisk(JobId(6), prefix, Span(0, expected), SLOTS, 60.0)
        assert side.obey(fetch) == [Answer(6, expected)]
        wipe(side)
        side.obey(load(side, tokens=Span(0, expected)))
        assert num_wrong(world, Span(0, expected)) == 0


def test_a_record_has_the_strongest_wish_that_touches_it():
    wishes = [Wish(Span(0, 32), 90, 60_000), Wish(Span(32, 64), 90), Wish(Span(64, 75), 5)]
    assert [*by_record(wishes, 16)] == wishes
    assert [*by_record(wishes, 40)] == [Wish(Span(0, 75), 90)]
    assert [*by_record(wishes, 64)] == [Wish(Span(0, 64), 90), Wish(Span(64, 75), 5)]
    assert [*by_record((), 64)] == []


def test_a_save_that_failed_is_not_written(sides, tmp_path):
    world = full_world(cut(), NUM_TOKENS)
    side = sides(world, 0, PrefixStore(config_of(tmp_path), world.state))
    side.obey(save(side, write=write(), within_s=-1.0))
    assert set(side.answers) == {Answer(1, 0), Answer(3, 0)}
    assert not list(tmp_path.rglob("l0-3.*"))


def test_what_was_done_is_told_once(sides, tmp_path):
    world = full_world(cut(), NUM_TOKENS)
    side = sides(world, 0, PrefixStore(config_of(tmp_path, quota_bytes=100), world.state))
    side.obey(save(side, write=write()))
    counters = side.worker.take_report()["counters"]
    assert set(counters) == {"tier_save_bytes", "tier_save_seconds", "tier_disk_errors"} < set(metrics.COUNTERS)
    assert counters["tier_save_bytes"] == NUM_TOKENS * 3 * 2 * 4 * 4 * 4
    assert counters["tier_disk_errors"] == 1, "no room on disk"
    assert side.worker.take_report() is None


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_file_is_read_up_to_it(sides, tmp_path, damage):
    world = full_world(cut(), NUM_TOKENS)
    side = sides(world, 0, PrefixStore(config_of(tmp_path), world.state))
    side.obey(save(side, write=write()))
    third = side.worker._store.chain(range(NUM_TOKENS)).key(2, 16).hex()
    (path,) = tmp_path.rglob(f"{third}/*")
    content = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(content[:-1])
    else:
        content[-100] ^= 1
        path.write_bytes(content)
    (told,) = side.obey(FetchFromDisk(JobId(4), PREFIX, Span(0, NUM_TOKENS), SLOTS, 60.0))
    assert told == Answer(4, 32)
    assert sum(number for name, number in side.worker.disk_counts().items() if name.startswith("read ")) == 1


def full(*_):
    raise OSError(errno.ENOSPC, "full")


def test_a_full_disk_is_an_answer(sides, tmp_path):
    world = full_world(cut(), NUM_TOKENS)
    side = sides(world, 0, PrefixStore(config_of(tmp_path), world.state, mover=PlainFiles(FileCalls(write=full))))
    side.obey(save(side, write=write()))
    assert set(side.answers) == {Answer(1, NUM_TOKENS), Answer(3, 0)}
    assert side.obey(FindOnDisk(JobId(6), PREFIX, 60.0)) == [Answer(6, 0)]


class HangingStore(PrefixStore):
    """Its lookups end when somebody lets them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.let_go = threading.Event()

    def lookup(self, *args):
        self.let_go.wait(60)
        return super().lookup(*args)


def test_a_disk_that_hangs_holds_up_nothing_else(sides, tmp_path):
    world = full_world(cut(), NUM_TOKENS)
    store = HangingStore(config_of(tmp_path), world.state)
    side = sides(world, 0, store)
    side.worker.run(TierOrders((FindOnDisk(JobId(9), PREFIX, 60.0),)))
    assert side.obey(save(side)) == [Answer(1, NUM_TOKENS)]
    wipe(side)
    assert side.obey(load(side)) == [Answer(2, NUM_TOKENS)]
    assert num_wrong(world, Span(0, NUM_TOKENS)) == 0
    store.let_go.set()
    wait_for(lambda: side.look() == 3)


def test_prompts_that_wait_go_before_writes_and_late_ones_are_not_looked_for(sides, tmp_path):
    world = full_world(cut(), NUM_TOKENS)
    store = HangingStore(config_of(tmp_path), world.state)
    side = sides(world, 0, store)
    side.worker.run(TierOrders((FindOnDisk(JobId(1), PREFIX, 60.0), FindOnDisk(JobId(2), PREFIX, 0.0))))
    side.worker.run(TierOrders((save(side, 3, write=write(4)), FindOnDisk(JobId(5), PREFIX, 60.0))))
    wait_for(lambda: side.look() == 1)
    wait_for(lambda: side.worker._disk.qsize() == 3)
    store.let_go.set()
    wait_for(lambda: side.look() == 5)
    assert [answer.job for answer in side.answers] == [3, 1, 2, 5, 4]
    assert store.counts["lookup absent"] == 2
