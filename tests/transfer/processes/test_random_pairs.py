"""Random pairs of layouts between two processes: every element moves once, through NIXL, to its place.

All ranks of the sender live in one process, all of the receiver in another; each rank has an agent of its own. The
usual run plays 20 pairs, half of them over each transport, the long one 200 over each.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kv_testing.child import Child
from kv_testing.fleet.pairs import run_side
from kv_testing.layouts import random_pair
from kv_testing.waiting import wait_for

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

MAX_RANKS = 8
"""Of one side: each rank has four threads."""
NUM_USUAL, NUM_LONG = 10, 200


@pytest.fixture(scope="module", params=[None, "tcp"], ids=["shm", "tcp"])
def processes(request) -> Iterator[tuple[Child, Child]]:
    with ExitStack() as stack:
        sender, receiver = (
            stack.enter_context(Child(run_side, role, request.param)) for role in ("sender", "receiver")
        )
        yield sender, receiver


def test_every_element_moves_once_to_its_place(processes):
    sender, receiver = processes
    for seed in seeds_of_pairs(0, NUM_USUAL):
        play(sender, receiver, seed)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_pairs(processes, record_property):
    first = 100_000 * (1 + int(os.environ.get("KVFERRY_SEED", "0")))
    seeds = seeds_of_pairs(first, NUM_LONG)
    sender, receiver = processes
    total = sum(play(sender, receiver, seed) for seed in seeds)
    record_property("pairs", len(seeds))
    record_property("bytes", total)


def test_a_wrong_element_is_found(processes):
    """Negative control: one bit of one element is changed after all have come."""
    seed = next(seed for seed in seeds_of_pairs(0, 50) if random_pair(seed).receiver.layout.is_plain)
    sender, receiver = processes
    assert play(sender, receiver, seed, spoil=True) > 0


def play(sender: Child, receiver: Child, seed: int, *, spoil: bool = False) -> int:
    """The hand-over of one pair; the bytes that moved."""
    place = sender.ask("begin", seed)
    receiver.ask("begin", seed)
    transfer = sender.ask("offer")
    receiver.ask("fetch", *place, transfer)
    pair = random_pair(seed)
    num_ranks = len(pair.receiver.parallel.ranks_of(pair.receiver_group))
    received = wait_for(
        lambda: found if len(found := receiver.ask("outcomes")) == num_ranks else [], 60.0, f"the end of seed {seed}"
    )
    assert all(each.ok for each in received), (seed, received)
    if spoil:
        receiver.ask("spoil")
        assert receiver.ask("num_misplaced") == 1
    else:
        assert receiver.ask("num_misplaced") == 0, f"seed={seed}"
    num_bytes = sum(each.num_bytes for each in received)
    assert num_bytes == receiver.ask("num_bytes_wanted"), f"seed={seed}: elements move more than once, or not at all"
    receiver.ask("end")
    sender.ask("end")
    return num_bytes


def seeds_of_pairs(first: int, count: int) -> list[int]:
    """Pairs of a few ranks with something to move."""
    found: list[int] = []
    seed = first
    while len(found) < count:
        pair = random_pair(seed)
        num_ranks = max(pair.sender.parallel.num_ranks, pair.receiver.parallel.num_ranks)
        if pair.tokens and num_ranks <= MAX_RANKS:
            found.append(seed)
        seed += 1
    return found
