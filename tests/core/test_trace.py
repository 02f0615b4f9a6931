"""Traces: reading, the ceilings of the published files, and Belady against trying everything."""

import json
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import CallerError
from kv_core.trace import TraceRequest, ceiling_hits, clairvoyant_hits, leading, read_trace


def write(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(length, ids, at=0):
    return {"timestamp": at, "input_length": length, "output_length": 1, "hash_ids": ids}


def test_ids_are_blocks(tmp_path):
    path = write(tmp_path, row(1000, [7, 8], 3), row(512, [7], 9))
    assert list(read_trace(path)) == [TraceRequest(3, (7, 8)), TraceRequest(9, (7,))]


def test_smaller_blocks_divide_the_ids(tmp_path):
    path = write(tmp_path, row(5, [1, 2]))
    assert [one.blocks for one in read_trace(path, 4, 2)] == [(2, 3, 4)]
    assert [one.blocks for one in read_trace(path, 4, 1)] == [(4, 5, 6, 7, 8)]
    with pytest.raises(CallerError, match="id=4, block=3"):
        list(read_trace(path, 4, 3))


@pytest.mark.parametrize("line", ["{", '{"timestamp": 1}', "[1]", json.dumps(row(513, [1]))])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row(1, [1])) + "\n" + line)
    with pytest.raises(CallerError, match="line 2"):
        list(read_trace(path))


def test_ceiling_counts_leading_blocks_only():
    requests = [TraceRequest(0, (1, 2, 3)), TraceRequest(1, (1, 9, 3)), TraceRequest(2, (1, 9))]
    assert ceiling_hits(requests) == 0 + 1 + 2


chains = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=6)


def as_requests(paths):
    """Binary paths as chained block names: equal leading names are an equal prefix."""
    names: dict[tuple[int, ...], int] = {}

    def name(prefix):
        return names.setdefault(prefix, len(names))

    return [
        TraceRequest(at, tuple(name(tuple(path[: end + 1])) for end in range(len(path))))
        for at, path in enumerate(paths)
    ]


def best_by_trying(requests, capacity):
    @cache
    def best(number, present):
        if number == len(requests):
            return 0
        blocks = requests[number].blocks
        if len(blocks) > capacity:
            return best(number + 1, present)
        others = present - set(blocks)
        room = min(len(others), capacity - len(blocks))
        kept = (frozenset(chosen) | set(blocks) for chosen in combinations(sorted(others), room))
        return leading(blocks, set(present)) + max(best(number + 1, frozenset(one)) for one in kept)

    return best(0, frozenset())


@given(chains, st.integers(1, 6))
def test_clairvoyance_never_claims_more_than_the_best_of_all_choices(paths, capacity):
    requests = as_requests(paths)
    assert clairvoyant_hits(requests, capacity) <= best_by_trying(requests, capacity)


def test_with_chains_the_best_choice_may_beat_the_rule_of_the_farthest_use():
    # The request of three blocks is longer than the cache and is passed over, yet its uses decide what is given up.
    requests = as_requests([[1, 1], [1, 1, 0], [1], [0], [1]])
    assert (clairvoyant_hits(requests, 2), best_by_trying(requests, 2)) == (1, 2)


@given(chains)
def test_clairvoyance_with_room_for_all_is_the_ceiling(paths):
    requests = as_requests(paths)
    assert clairvoyant_hits(requests, 100) == ceiling_hits(requests)
