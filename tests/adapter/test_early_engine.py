"""Engines that preempt, abort and begin anew while peers may read: what is said to be computed always is.

`KVFERRY_SEED` moves the long version to other engines.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from kv_engine_adapter.early import EarlyOffers, EarlyTerms
from kv_testing.booked import EARLY_LEASE_S
from kv_testing.early_engine import SIZE, Broken, EarlyEngine

NUM_ENGINES, NUM_LONG = 150, 20_000
SHARD = 10_000_000


@pytest.fixture(autouse=True)
def _quiet_log() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def play(seeds: range) -> Counter[str]:
    """How many tokens could be read, and how many loads have failed, over all of them; the error names the seed."""
    found: Counter[str] = Counter()
    for seed in seeds:
        engine = EarlyEngine(seed)
        try:
            found["read"] += engine.play()
        except Exception as error:
            raise Broken(f"seed {seed}: {type(error).__name__}: {error}") from error
        found["lost"] += engine.num_lost
    return found


def test_what_is_told_is_computed() -> None:
    found = play(range(NUM_ENGINES))
    assert found["read"] > 100 * NUM_ENGINES, "else nothing is tried"
    assert found["lost"] > NUM_ENGINES / 4


@pytest.mark.long
def test_what_is_told_is_computed_long() -> None:
    first = SHARD * int(os.environ.get("KVFERRY_SEED", "0"))
    assert play(range(first, first + NUM_LONG))["read"] > 100 * NUM_LONG


def _without_preemptions(patch: pytest.MonkeyPatch) -> None:
    stepped = EarlyOffers.stepped
    patch.setattr(EarlyOffers, "stepped", lambda self, scheduled, gone, **more: stepped(self, scheduled, (), **more))


def _without_aborts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EarlyOffers, "aborted", lambda self, request_id: self._early.pop(request_id, None))


def _one_step_early(patch: pytest.MonkeyPatch) -> None:
    advance = EarlyOffers._advance

    def hurry(self, each, early) -> None:
        early.computed_by_step = each.num_computed + each.num_scheduled
        advance(self, each._replace(num_computed=early.computed_by_step), early)

    patch.setattr(EarlyOffers, "_advance", hurry)


def _before_a_load_is_known_good(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EarlyEngine, "_terms", lambda self: EarlyTerms(EARLY_LEASE_S, 1, SIZE, num_in_flight=0))


def _with_any_id(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EarlyOffers, "_is_taken", lambda self, name: False)


def _with_both_roles(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kv_engine_adapter.early.wants_load", lambda params: False)


def _with_guessed_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kv_engine_adapter.early.ceil_div", lambda tokens, size: tokens)


CONTROLS = [
    _without_preemptions,
    _without_aborts,
    _one_step_early,
    _before_a_load_is_known_good,
    _with_any_id,
    _with_both_roles,
    _with_guessed_blocks,
]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda each: each.__name__[1:])
def test_what_is_switched_off_is_missed(control, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else these engines would prove nothing."""
    control(monkeypatch)
    with pytest.raises(Broken):
        play(range(NUM_ENGINES))
