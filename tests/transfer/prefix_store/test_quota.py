"""Room: who goes first, that nothing ever takes more than the quota, and that nothing goes in vain."""

import fcntl
import os
import time
from random import Random

import pytest

from kv_core.spans import Span
from kv_testing.stores import config_of, cut, full_world, misses, prompt, record_files, write_all
from kv_transfer.file_mover import FileCalls, PlainFiles
from kv_transfer.prefix_store.store import PrefixStore

STATE = cut()
RECORD = full_world(STATE, 16)  # any bytes will do
RECORD_BYTES = 256 + 3 * 2 * 16 * 4 * 4 * 4
"""Header; layers, K and V, tokens, heads, elements, bytes."""


class Shelf:
    """A store for so many records of 16 tokens, and the prompts it was asked to keep, one record each."""

    def __init__(self, directory, num_records, **changes):
        self.now = 1_000_000.0
        self.directory = directory / "store"
        quota = changes.pop("quota_bytes", num_records * RECORD_BYTES)
        mover = changes.pop("mover", None)
        config = config_of(directory, quota_bytes=quota, **changes)
        self.store = PrefixStore(config, STATE, mover=mover, clock=lambda: self.now)

    def chain(self, name):
        return self.store.chain(prompt(16, 100 * name))

    def keep(self, name, **wish):
        (outcome,) = write_all(self.store, self.chain(name), RECORD, Span(0, 16), **wish)
        return outcome.why

    def used_at(self, name, seconds):
        """As if it had last been used then."""
        folder = self.chain(name).key(0, 16).hex()
        (path,) = self.directory.glob(f"v1-*/??/{folder}/*")
        os.utime(path, (seconds, seconds))

    def has(self, *names):
        return [name for name in names if self.store.lookup(self.chain(name))]

    def num_bytes(self):
        return sum(path.stat().st_size for path in record_files(self.directory))


def test_the_least_used_goes_first(tmp_path):
    shelf = Shelf(tmp_path, 4)
    for name in range(4):
        assert shelf.keep(name) is None
        shelf.used_at(name, 100 + (name + 2) % 4)
    assert shelf.keep(4) is None
    assert Shelf(tmp_path, 4).has(0, 1, 2, 3, 4) == [0, 1, 4], "one for the newcomer, one for a tenth of the quota"
    assert shelf.store.counts["evicted_keys"] == 2
    assert shelf.store.counts["evicted_bytes"] == 2 * RECORD_BYTES


def test_reading_is_use(tmp_path):
    shelf = Shelf(tmp_path, 10)
    for name in range(10):
        shelf.keep(name)
        shelf.used_at(name, 100 + name)
    (caches,), tables = RECORD.caches.values(), RECORD.tables(0).by_group
    assert shelf.store.read(shelf.chain(0), Span(0, 16), caches, tables) == 16
    shelf.keep(10)
    assert Shelf(tmp_path, 10).has(*range(11)) == [0, *range(3, 11)]


def test_priority_goes_before_use_and_a_flood_of_lower_priority_evicts_nothing_of_higher(tmp_path):
    shelf = Shelf(tmp_path, 5)
    for name in range(3):
        assert shelf.keep(name, priority=90) is None
        shelf.used_at(name, 1)
    for name in range(3, 40):
        assert shelf.keep(name) is None
    assert Shelf(tmp_path, 5).has(*range(3)) == [0, 1, 2]
    assert shelf.keep(40, priority=91) is None


def test_nothing_of_higher_priority_goes_for_a_newcomer(tmp_path):
    shelf = Shelf(tmp_path, 3)
    for name in range(3):
        assert shelf.keep(name, priority=36) is None
    assert shelf.keep(3) == "quota"
    assert misses(shelf.store, "write") == {"quota": 1}
    assert Shelf(tmp_path, 3).has(*range(4)) == [0, 1, 2]
    assert shelf.keep(3, priority=36) is None


def test_a_priority_ends_with_its_duration(tmp_path):
    shelf = Shelf(tmp_path, 2)
    for name in range(2):
        assert shelf.keep(name, priority=90, expires_at=1_000_600) is None
    assert shelf.keep(2) == "quota"
    shelf.now = 1_000_600
    assert shelf.keep(2) is None


def test_a_higher_wish_replaces_a_lower_one_and_not_the_other_way(tmp_path):
    shelf = Shelf(tmp_path, 4)
    for priority, name in ((35, "p35"), (80, "p80"), (20, "p80")):
        assert shelf.keep(0, priority=priority) is None
        (path,) = record_files(shelf.directory)
        assert f".{name}." in path.name
    assert shelf.store.counts["kept_records"] == 1


def test_nothing_goes_for_what_never_fits(tmp_path):
    shelf = Shelf(tmp_path, 3)
    for name in range(3):
        shelf.keep(name)
    tight = Shelf(tmp_path, 1, quota_bytes=RECORD_BYTES - 1)
    assert tight.keep(9) == "quota"
    assert shelf.has(0, 1, 2) == [0, 1, 2]


def test_the_quota_holds_whatever_is_written_by_two_stores_even_while_files_are_filled(tmp_path):
    seen, quota = [], 6 * RECORD_BYTES + 17

    def write(file, buffer):
        files = [*record_files(tmp_path / "store"), *(tmp_path / "store").glob("*/*.part")]
        seen.append(sum(path.stat().st_size for path in files))
        return os.write(file, buffer)

    shelves = [Shelf(tmp_path, 0, quota_bytes=quota, mover=PlainFiles(FileCalls(write=write))) for _ in "12"]
    dice = Random(0)
    for _ in range(60):
        shelf = dice.choice(shelves)
        assert shelf.keep(dice.randrange(20), priority=dice.choice((35, 40))) in (None, "quota")
        assert shelf.num_bytes() <= quota
    assert max(seen) <= quota
    assert max(seen) > 5 * RECORD_BYTES, "it was full"


def test_a_lost_or_damaged_count_is_found_anew(tmp_path):
    shelf = Shelf(tmp_path, 3)
    for name, harm in enumerate((lambda path: path.unlink(), lambda path: path.write_bytes(b"x"), lambda path: None)):
        harm(shelf.directory / "usage")
        assert shelf.keep(name) is None
    assert int.from_bytes((shelf.directory / "usage").read_bytes(), "little") == 3 * RECORD_BYTES


def test_a_lock_that_is_not_given_up_is_a_miss_in_time(tmp_path):
    shelf = Shelf(tmp_path, 3, lock_timeout_s=0.05)
    lock = os.open(shelf.directory / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    start = time.monotonic()
    assert shelf.keep(0) == "busy"
    assert time.monotonic() - start < 5
    os.close(lock)
    assert shelf.keep(0) is None


def test_a_smaller_quota_holds_from_the_next_write_on(tmp_path):
    shelf = Shelf(tmp_path, 8)
    for name in range(8):
        shelf.keep(name)
    small = Shelf(tmp_path, 3)
    assert small.keep(8) is None
    assert small.num_bytes() <= 3 * RECORD_BYTES


@pytest.mark.parametrize(
    "changes", [{"quota_bytes": 0}, {"max_indexed": 0}, {"tokens_per_record": 0}, {"hash_rule": ""}]
)
def test_settings_without_sense_are_refused(tmp_path, changes):
    with pytest.raises(ValueError, match="got|needs|empty"):
        config_of(tmp_path, **changes)


def test_a_file_that_is_being_filled_counts_with_its_whole_size(tmp_path):
    others = []

    def write(file, buffer):
        if not others:
            others.extend((1, 2))
            assert [beside.keep(name) for name in others] == [None, None]
        return os.write(file, buffer)

    beside = Shelf(tmp_path, 2)
    shelf = Shelf(tmp_path, 2, mover=PlainFiles(FileCalls(write=write)))
    assert shelf.keep(0) is None
    assert shelf.num_bytes() == 2 * RECORD_BYTES
    assert shelf.has(0, 1, 2) == [0, 2]


def test_what_a_dead_process_was_writing_makes_room_for_a_living_one(tmp_path):
    living = Shelf(tmp_path, 3)
    dead = living.directory / "kv-blocks-1-dead"
    dead.mkdir()
    for name, size in (("lock", 0), ("0.part", 2 * RECORD_BYTES)):
        (dead / name).write_bytes(bytes(size))
    (living.directory / "usage").unlink()
    assert [living.keep(name) for name in range(3)] == [None] * 3
    assert not dead.exists()
    assert living.has(0, 1, 2) == [0, 1, 2]


def test_what_others_evicted_is_written_again(tmp_path):
    shelf = Shelf(tmp_path, 3)
    assert shelf.keep(0) is None
    assert shelf.has(0) == [0]
    (path,) = record_files(shelf.directory)
    path.unlink()
    assert shelf.keep(0) is None
    assert record_files(shelf.directory) == [path]
