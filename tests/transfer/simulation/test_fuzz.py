"""Random and mutated packets at live ranks: no error but the documented ones, no unbounded memory.

Real packets of running sessions are recorded, changed, and delivered where they were going: half of them in their
bytes, which hardly ever leaves a message, and half in the values of their fields, which nearly always does and is then
a hostile peer's. Nothing is on offer, so no bytes move.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from kv_testing.messages import SAMPLES, altered, mutated
from kv_testing.sim.schedule import World
from kv_testing.sim.weather import Weather
from kv_transfer.protocol import codec
from kv_transfer.protocol.errors import ProtocolError
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
        dice, num_bad, read = Random(seed), 0, Counter[str]()
        samples = [codec.encode(sample) for sample in SAMPLES]
        for number in range(num_packets):
            if number % NUM_ROUND == 0:
                num_bad = _bad_messages(world)
                _order_again(world)
                _check_bounded(world)
            packet, arrive = dice.choice(recorded)
            change = dice.choice((mutated, altered))
            changed = change(dice.choice(samples) if dice.random() < 0.2 else packet, dice)
            read[_type_of(changed)] += 1
            arrive(changed)
            del recorded[:-512]
        assert num_bad > num_packets / 50, f"garbage is counted: {num_bad}"
        assert set(read) == {"nothing", *(type(each).__name__ for each in SAMPLES)}
        assert min(read.values()) > num_packets / 1000, f"each kind of message is read: {read}"
        _check_bounded(world)
    finally:
        logging.disable(logging.NOTSET)


def _type_of(packet: bytes) -> str:
    try:
        return type(codec.decode(packet)).__name__
    except ProtocolError:
        return "nothing"


def _check_bounded(world: World) -> None:
    for rank in (rank for instance in world.instances for rank in instance.ranks):
        gauges = rank.core.measure().gauges
        assert max(gauges[name] for name in ("sessions", "peers", "parked")) < MAX_OPEN
        assert not rank.process.counters["internal_errors"]


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
