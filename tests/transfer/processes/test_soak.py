"""Ten thousand requests, one storm and one fault after the other: memory, threads and file handles do not grow."""

import itertools
import os
from collections import Counter
from random import Random

import pytest

from kv_core.spans import Span
from kv_testing.fleet.cases import all_cases, play
from kv_testing.fleet.fleet import DECODES, HASTY, PREFILLS, Fleet
from kv_testing.fleet.traps import Weather
from kv_testing.worlds import NUM_TOKENS

pytestmark = [pytest.mark.nixl, pytest.mark.long, pytest.mark.timeout(3600)]

NUM_REQUESTS, NUM_ROUND = 10_000, 500
MAX_IN_FLIGHT = 16
MAX_GROWTH_BYTES = 8 << 20
"""Of an engine that lived through the second half of it: far less than one KiB a request."""
DRIZZLE = Weather(drop=0.01, double=0.01, late=0.01, corrupt=0.01)


@pytest.mark.parametrize("shared_fleet", [None], ids=["shm"], indirect=True)
def test_nothing_grows_over_ten_thousand_requests(fleet, record_property):
    """Every second round in bad weather. Threads and handles are the fleet's own law, checked after each round."""
    dice = Random(int(os.environ.get("KVFERRY_SEED", "0")))
    outcomes, resident = Counter[str](), []
    for number in range(NUM_REQUESTS // NUM_ROUND):
        in_weather(fleet, DRIZZLE if number % 2 else Weather())
        outcomes += one_round(fleet, dice)
        in_weather(fleet, Weather())
        fleet.check_at_rest()
        resident.append({name: seat.child.held.resident_bytes for name, seat in fleet.seats.items()})
    record_property("outcomes", dict(outcomes))
    record_property("resident_mib_at_1000", mib(resident[1]))
    record_property("resident_mib_at_5000", mib(resident[len(resident) // 2 - 1]))
    record_property("resident_mib_at_end", mib(resident[-1]))
    record_property("held", {name: str(seat.child.held) for name, seat in fleet.seats.items()})
    assert outcomes["done"] + outcomes["failed"] == NUM_REQUESTS
    assert outcomes["failed"] == outcomes["failed, hasty"], outcomes
    for name, num_bytes in resident[-1].items():
        assert num_bytes - resident[len(resident) // 2 - 1][name] < MAX_GROWTH_BYTES, name


@pytest.mark.parametrize("shared_fleet", [None, "tcp"], ids=["shm", "tcp"], indirect=True)
def test_survivors_do_not_grow_while_others_die(fleet, record_property):
    """The same two engines see all others killed again and again, at random steps, with a hand-over under way."""
    dice = Random(int(os.environ.get("KVFERRY_SEED", "0")))
    deaths = [
        case
        for case in all_cases()
        if case.trap.action == "kill" and (case.prefill, case.decode) == ("p0", "d0") and case.victim == "d0"
    ]
    survivors = ("p0", "p1")
    resident = []
    for _ in range(40):
        play(fleet, dice.choice(deaths))
        resident.append({name: fleet.seats[name].child.held.resident_bytes for name in survivors})
    record_property("resident_mib", [mib(each) for each in resident[9::10]])
    for name in survivors:
        assert resident[-1][name] - resident[9][name] < MAX_GROWTH_BYTES


def one_round(fleet: Fleet, dice: Random) -> Counter[str]:
    """Requests between any two, for any tokens, many at once; counted by how they ended."""
    pairs = list(itertools.product(PREFILLS, DECODES))
    requests = []
    for _ in range(NUM_ROUND):
        start = dice.randrange(NUM_TOKENS)
        tokens = Span(start, dice.randint(start + 1, NUM_TOKENS))
        requests.append(fleet.request(*dice.choice(pairs), tokens))
        while len(fleet.requests) >= MAX_IN_FLIGHT:
            fleet.collect()
    counts = Counter[str]()
    for request in requests:
        ended = fleet.outcome(request)
        counts["done" if ended.ok else "failed"] += 1
        counts["failed, hasty"] += not ended.ok and request.decode == HASTY
    return counts


def in_weather(fleet: Fleet, weather: Weather) -> None:
    for name in fleet.seats:
        fleet.ask(name, "weather", weather)


def mib(resident: dict[str, int]) -> dict[str, float]:
    return {name: round(num_bytes / 2**20, 1) for name, num_bytes in resident.items()}
