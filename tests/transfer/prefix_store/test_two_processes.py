"""Two engines on one directory, of which one may die at any moment."""

import multiprocessing
import os
import signal

import pytest

from kv_core.spans import Span
from kv_testing.store_players import NUM_TOKENS, RECORD_BYTES, play, stop_halfway, world_of
from kv_testing.stores import config_of, cut, misses, num_wrong, prompt, read_all, record_files, write_all
from kv_testing.tagged import make_world
from kv_transfer.prefix_store.store import PrefixStore

SPAWN = multiprocessing.get_context("spawn")
QUOTA = 9 * RECORD_BYTES
"""Half of what all prompts take, so that each evicts what the other one reads."""


def play_both(directory, num_rounds, seed):
    """What two engines of different shape have seen."""
    results = SPAWN.Queue()
    players = [
        SPAWN.Process(target=play, args=(directory, seed + tp, tp, size, num_rounds, QUOTA, results))
        for tp, size in ((2, 16), (1, 32))
    ]
    for player in players:
        player.start()
    found = [results.get(timeout=600) for _ in players]
    for player in players:
        player.join()
    assert [player.exitcode for player in players] == [0, 0]
    return found


def assert_right(directory, found):
    assert all(num_read > 0 for num_read, _, _ in found), found
    assert [num_wrong for _, num_wrong, _ in found] == [0, 0]
    counts = {name for _, _, counts in found for name in counts}
    assert "evicted_keys" in counts
    refused = {name for name in counts if name.split()[0] in ("read", "write", "open")}
    assert refused <= {"read absent", "write quota", "write absent"}, "nothing half was ever seen"
    assert sum(path.stat().st_size for path in record_files(directory / "store")) <= QUOTA
    assert list((directory / "store").glob("kv-blocks-*")) == []


def test_two_processes_write_read_and_evict_at_once(tmp_path):
    assert_right(tmp_path, play_both(tmp_path, 60, 0))


@pytest.mark.long
def test_the_same_for_longer(tmp_path):
    assert_right(tmp_path, play_both(tmp_path, 4000, int(os.environ.get("KVFERRY_SEED", "0"))))


def test_a_process_that_is_killed_in_the_middle_of_a_write_leaves_nothing_half(tmp_path):
    is_halfway = SPAWN.Event()
    writer = SPAWN.Process(target=stop_halfway, args=(tmp_path, is_halfway))
    writer.start()
    assert is_halfway.wait(120)
    state, parts = cut(), lambda: list((tmp_path / "store").glob("*/*.part"))
    chain = PrefixStore(config_of(tmp_path), state).chain(prompt(NUM_TOKENS))

    beside = PrefixStore(config_of(tmp_path), state)
    assert len(parts()) == 1, "a living process keeps what it is writing"
    assert beside.lookup(chain) == 16, "and nobody sees it"

    writer.kill()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert len(parts()) == 1
    after = PrefixStore(config_of(tmp_path), state)
    assert parts() == []
    target = make_world(state, NUM_TOKENS, "CBTHD", 1)
    assert after.lookup(chain) == 16
    assert read_all(after, chain, target, Span(0, NUM_TOKENS)) == {16}
    assert misses(after, "read") == {"absent": 1}
    assert num_wrong(target, Span(0, 16)) == 0
    (outcome,) = write_all(after, chain, world_of(state, 0), Span(0, NUM_TOKENS))
    assert (outcome.num_tokens, outcome.num_bytes) == (NUM_TOKENS, 2 * RECORD_BYTES)
    assert beside.lookup(chain) == NUM_TOKENS, "what is new is found by whoever was there before"
    usage = int.from_bytes((tmp_path / "store" / "usage").read_bytes(), "little")
    assert usage == 3 * RECORD_BYTES, "the dead one's reservation is not counted any more"
