"""Random and mutated packets at live ranks: no error but the documented ones, no unbounded memory.

Real packets of running sessions are recorded, changed, and delivered where they were going; a packet that still says
something is then a hostile peer's. Nothing is on offer, so no bytes move.
"""

import logging
import os
from collections.abc import Callable
from random import Random

import pytest

from kv_testing.messages import SAMPLES, mutated
from kv_testing.sim.schedule import World
from kv_testing.sim.weather import Weather
from kv_transfer.protocol import codec
from kv_transfer.protocol.messages import Message, Rejected

pytestmark = pytest.mark.drawn

NUM_PACKETS, NUM_LONG = 100_000, 10_000_000
NUM_ROUND = 2_000
"""Packets between two requests that bring new sessions."""
MAX_OPEN = 8192
"""Of sessions and peers of one rank: far above what the world opens itself, far below the number of packets."""


def test_mutated_packets_at_live_ranks() -> None:
    _pelt(NUM_PACKETS, seed=1)


@pytest.mark.long
def test_many_mutated_packets_at_live_ranks() -> None:
    """About 3 minutes."""
    _pelt(NUM_LONG, seed=2 + int(os.environ.get("KVFERRY_SEED", "0")))


def _pelt(num_packets: int, seed: int) -> None:
    logging.disable(logging.CRITICAL)
    try:
        world = World(seed)
        world.clockwork.weather = Weather(calm_at=0.0)
        recorded = _record(world)
        dice, num_bad = Random(seed), 0
        samples = [codec.encode(sample) for sample in SAMPLES]
        for number in range(num_packets):
            if number % NUM_ROUND == 0:
                num_bad = _bad_messages(world)
                _order_again(world)
            packet, arrive = dice.choice(recorded)
            arrive(mutated(dice.choice(samples) if dice.random() < 0.2 else packet, dice))
            del recorded[:-512]
        assert num_bad > NUM_ROUND / 2, "garbage is counted"
        for rank in (rank for instance in world.instances for rank in instance.ranks):
            gauges = rank.core.measure().gauges
            assert max(gauges[name] for name in ("sessions", "peers", "parked")) < MAX_OPEN
            assert not rank.process.counters["internal_errors"]
    finally:
        logging.disable(logging.NOTSET)


def _record(world: World) -> list[tuple[bytes, Callable[[bytes], None]]]:
    """Every packet from now on, and how to deliver another in its place."""
    recorded: list[tuple[bytes, Callable[[bytes], None]]] = []
    carry = world.network.carry

    def record(message: Message, arrive: Callable[[bytes], None]) -> None:
        if not isinstance(message, Rejected):  # else soon nothing but answers to garbage is recorded
            recorded.append((codec.encode(message), arrive))
        carry(message, arrive)

    world.network.carry = record  # type: ignore[method-assign]
    return recorded


def _order_again(world: World) -> None:
    """A fresh request that waits for an offer which never comes, and whoever was killed by a lie is met again."""
    request = world._request(len(world.requests))
    request.number %= 8
    if all(
        each.request_id != request.request_id or len(each.outcomes) == len(each.ordered) for each in world.requests[:-1]
    ):
        world.requests = [each for each in world.requests if each.request_id != request.request_id] + [request]
        world._order(request)
    else:
        world.requests.pop()
    world.clockwork.run_until(world.clockwork.now + 0.6)


def _bad_messages(world: World) -> int:
    return sum(rank.process.counters["bad_messages"] for instance in world.instances for rank in instance.ranks)
