"""The disk of a rank over real tensors: what is read is what was written, and whatever a disk does is an answer."""

import errno
import threading

import pytest

from kv_core.keys import Scope
from kv_core.spans import Span
from kv_core.token_log import packed
from kv_engine_adapter import metrics
from kv_engine_adapter.tier_orders import (
    Answer,
    FetchFromDisk,
    FindOnDisk,
    JobId,
    Prefix,
    Rates,
    TierOrders,
    Wish,
    WriteToDisk,
)
from kv_engine_adapter.tier_worker import by_record
from kv_testing.stores import config_of, cut, full_world, num_wrong
from kv_testing.tagged import make_world
from kv_testing.tier_side import ALL, NUM_TOKENS, PREFIX, SIZE, SLOTS, WISHES, load, making_sides, save, wipe, write
from kv_testing.waiting import wait_for
from kv_transfer.file_mover import FileCalls, PlainFiles
from kv_transfer.prefix_store.store import PrefixStore


@pytest.fixture
def sides():
    with making_sides() as make:
        yield make


def full(*_):
    raise OSError(errno.ENOSPC, "full")


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
