"""Control messages dropped, doubled, late (and so out of order) and garbled by chance; arenas that are full."""

import itertools
import time
from dataclasses import replace
from random import Random

import pytest

from kv_core.spans import Span
from kv_testing.fleet.fleet import DECODES, HASTY, PREFILLS
from kv_testing.fleet.traps import Weather
from kv_testing.worlds import NUM_TOKENS

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

over_shared_memory = pytest.mark.parametrize("shared_fleet", [None], ids=["shm"], indirect=True)
STORM = Weather(drop=0.1, double=0.1, late=0.1, corrupt=0.1)


def all_under(fleet, weather):
    for name in fleet.seats:
        fleet.ask(name, "weather", weather)


@pytest.mark.parametrize(
    "weather",
    [
        STORM,
        *(
            pytest.param(weather, marks=pytest.mark.long)
            for weather in (
                Weather(drop=0.3),
                Weather(double=0.5),
                Weather(late=0.5),
                Weather(corrupt=0.3),
                replace(STORM, drop=0.25, corrupt=0.25),
            )
        ),
    ],
    ids=str,
)
def test_every_request_ends_well_in_any_weather(fleet, weather):
    """All messages are said again until they are heard, so no patient engine loses a request."""
    dice = Random(1)
    all_under(fleet, weather)
    pairs = [pair for pair in itertools.product(PREFILLS, DECODES) if pair[1] != HASTY] * 3
    starts = [dice.randrange(NUM_TOKENS) for _ in pairs]
    requests = [
        fleet.request(*pair, Span(start, dice.randint(start + 1, NUM_TOKENS)))
        for pair, start in zip(pairs, starts, strict=True)
    ]
    ended = [fleet.outcome(request) for request in requests]
    all_under(fleet, Weather())
    assert all(each.ok for each in ended), ended
    fleet.check_at_rest()
    fleet.hand_over_all()
    happened = [fleet.ask(name, "audit").happened for name in fleet.seats]
    for action, chance in vars(weather).items():
        assert not chance or sum(each.get(action, 0) for each in happened) > 0, f"nothing was {action}"


@over_shared_memory
@pytest.mark.parametrize("full", ["p0", "d1"])
def test_a_full_arena_keeps_requests_waiting(fleet, full):
    fleet.ask(full, "fill")
    request = fleet.request("p0", "d1")
    time.sleep(0.3)
    fleet.collect()
    assert request.ended is None
    fleet.hand_over("p1", "d0")
    fleet.ask(full, "empty")
    assert fleet.outcome(request).ok


@over_shared_memory
def test_an_arena_that_stays_full_fails_requests_at_their_deadline(fleet):
    fleet.ask(HASTY, "fill")
    ended = fleet.outcome(fleet.request("p1", HASTY))
    assert not ended.ok
    assert "deadline" in str(ended.reasons)
    fleet.ask(HASTY, "empty")
    fleet.hand_over("p1", HASTY)
