"""Whole worlds in one thread: every schedule keeps the laws, and a broken law is found.

`KVFERRY_SEED` moves the long version to other schedules, so that several machines can share it. A failure names its
seed; `python -m kv_testing.sim SEED` with tests/ on the path plays that schedule again, event by event the same.
"""

import logging
import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from random import Random

import pytest

from kv_core.ids import RequestId
from kv_testing.sim import schedule
from kv_testing.sim.clockwork import Violation
from kv_testing.sim.network import SimAgent
from kv_transfer.agent.base import Completion
from kv_transfer.core import Core
from kv_transfer.growth import GrowingBook, HeldGrowth
from kv_transfer.load import ReceiveSession
from kv_transfer.offers import OfferBook
from kv_transfer.peers import Peers
from kv_transfer.plan.frontier import Frontier
from kv_transfer.quarantine import Quarantine
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.timers import Timers
from kv_transfer.tombstones import Tombstones

pytestmark = pytest.mark.drawn

NUM_SCHEDULES = 20_000
"""8 to 10 ms each on one core (AMD EPYC, 2026-11-30): a minute and a half of two."""
NUM_STRETCHES, NUM_A_STRETCH = 40, 25_000
SHARD = 10_000_000

BROKEN_ONCE = [20761, 700586]
"""A run that was refused by a rank whose agent had failed asked the next run of it no more; a peer that was introduced
again while its blocks were read, before it was asked, was read twice."""

Patch = Callable[[pytest.MonkeyPatch], dict[str, object]]


@pytest.fixture(autouse=True)
def _quiet_log() -> Iterator[None]:
    """Each schedule has hundreds of warnings, as it should."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_schedules_keep_the_laws() -> None:
    num_workers = os.cpu_count() or 1
    strides = [range(first, NUM_SCHEDULES, num_workers) for first in range(num_workers)]
    with ProcessPoolExecutor(num_workers, multiprocessing.get_context("fork")) as pool:
        outcomes = [each for stride in pool.map(_outcomes_of, strides) for each in stride]
    num_ok, num_failed = (sum(each[name] for each in outcomes) for name in ("ok", "failed"))
    # Else the weather is so bad, or so good, that nothing is tried.
    assert num_ok > num_failed > num_ok / 10


def _outcomes_of(seeds: range) -> list[Counter[str]]:
    return [played.outcomes for played in schedule.run_all(seeds)]


@pytest.mark.long
@pytest.mark.parametrize("stretch", range(NUM_STRETCHES))
def test_many_schedules_keep_the_laws(stretch: int) -> None:
    """A million in all, 8 to 10 ms each on one core: two hours and a half; other seeds, other schedules."""
    first = SHARD * (1 + int(os.environ.get("KVFERRY_SEED", "0"))) + stretch * NUM_A_STRETCH
    schedule.run_all(range(first, first + NUM_A_STRETCH))


@pytest.mark.parametrize("seed", BROKEN_ONCE)
def test_schedules_that_once_broke_a_law_keep_them(seed: int) -> None:
    schedule.run(seed)


def test_a_seed_replays_exactly() -> None:
    """Also in another process, whose sets and hashes are ordered otherwise."""
    code = "from kv_testing.sim import schedule; print([schedule.run(seed) for seed in range(12)])"
    played = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(played) == 1
    assert played == {f"{[schedule.run(seed) for seed in range(12)]}\n"}


def _without_quarantine(patch: pytest.MonkeyPatch) -> dict[str, object]:
    patch.setattr(Quarantine, "keep", lambda self, lease, writer: lease.release())
    return {}


def _without_grace(patch: pytest.MonkeyPatch) -> dict[str, object]:
    patch.setattr(Quarantine, "free_later", lambda self, writers: self.free(writers))
    return {}


def _without_deadlines(patch: pytest.MonkeyPatch) -> dict[str, object]:
    return {"request_deadline_s": 3600.0}


def _without_checksum(patch: pytest.MonkeyPatch) -> dict[str, object]:
    return {"checksum": False}


def _without_proof(patch: pytest.MonkeyPatch) -> dict[str, object]:
    """What was read directly counts, whether or not its owner held it."""
    patch.setattr(Receiver, "_proven", lambda self, session, why: _believe(self, session))
    return {}


def _believe(receiver: Receiver, session: ReceiveSession) -> None:
    session.is_proven = True
    receiver._listener.session_moved(session)


def _without_tombstones(patch: pytest.MonkeyPatch) -> dict[str, object]:
    patch.setattr(Tombstones, "word", lambda self, name: None)
    return {}


def _without_probes(patch: pytest.MonkeyPatch) -> dict[str, object]:
    """Silence alone is taken for death."""
    patch.setattr(Peers, "_suspect", lambda self, peer: self.dead(peer, "it is silent"))
    return {}


def _without_write_ends(patch: pytest.MonkeyPatch) -> dict[str, object]:
    """Completions of writes are not taken."""
    patch.setattr(Core, "_completed", lambda self, completion: None)
    return {}


def _with_early_grants(patch: pytest.MonkeyPatch) -> dict[str, object]:
    """Senders tell, and judge grants, as if every prompt were computed to its end."""
    patch.setattr(HeldGrowth, "computed", property(lambda self: Frontier(self.tables.num_tokens)))
    patch.setattr(HeldGrowth, "filled", lambda self, tokens, layers=None: None)
    return {}


def _without_layers(patch: pytest.MonkeyPatch) -> dict[str, object]:
    """Whatever is computed ahead in some layers is taken for computed in all of them."""
    patch.setattr(Frontier, "covers", lambda self, tokens, layers=None: tokens.stop <= self.stop)
    return {"layers_per_chunk": 1}


def _without_standing(patch: pytest.MonkeyPatch) -> dict[str, object]:
    """What was read counts until the reactor has heard that the engine took the blocks back."""
    patch.setattr(GrowingBook, "abandon", _abandon_quietly)
    return {}


def _abandon_quietly(book: GrowingBook, request_id: RequestId, reason: str) -> str:
    del book._growing[request_id]
    return reason


def _with_sessions_of_abandoned_prompts(patch: pytest.MonkeyPatch) -> dict[str, object]:
    """Nobody is told that a prompt was given up, and what is read of it counts."""
    _without_standing(patch)
    patch.setattr(Sender, "abandon", lambda self, request_id, reason, **_: None)
    return {}


def _without_return(patch: pytest.MonkeyPatch) -> dict[str, object]:
    """What was preempted is taken for gone."""
    abandon = OfferBook.abandon
    lie = lambda book, request_id, reason, now, **_: abandon(book, request_id, reason, now)  # noqa: E731
    patch.setattr(OfferBook, "abandon", lie)
    return {}


def _with_early_timers(patch: pytest.MonkeyPatch) -> dict[str, object]:
    """The grace ends although its process stood still."""
    patch.setattr(Timers, "after_running", lambda self, span_s, run: self.after(span_s, run))
    return {}


def _with_ended_tickets(patch: pytest.MonkeyPatch) -> dict[str, object]:
    """An agent whose thread fails says that what it has posted is over."""
    fail = SimAgent.fail

    def lie(agent: SimAgent, dice: Random) -> None:
        posted = [write for write in agent._writes.values() if write.is_posted]
        fail(agent, dice)
        agent._ended += [Completion(write.ticket, "error", "its thread failed") for write in posted]

    patch.setattr(SimAgent, "fail", lie)
    return {}


REUSED = "memory was given back under a possible writer"

CONTROLS: list[tuple[Patch, int, str]] = [
    (_without_quarantine, 0, REUSED),
    (_without_grace, 0, REUSED),
    (_without_deadlines, 0, "outlives its deadline|still open"),
    (_without_checksum, 0, "wrong bytes"),
    (_without_proof, 4400, "wrong bytes"),
    (_without_write_ends, 0, "still open|the next request fails"),
    (_without_tombstones, 0, f"{REUSED}|still open"),
    (_without_probes, 110, REUSED),
    (_with_early_timers, 5260, REUSED),
    (_with_ended_tickets, 0, "given back under"),
    (_with_early_grants, 0, "before they were said to be computed|of another context rank"),
    (_without_layers, 0, "before they were said to be computed"),
    (_without_standing, 200, "wrong bytes|has not"),
    (_with_sessions_of_abandoned_prompts, 0, "wrong bytes|has not|still open"),
    (_without_return, 200, "told to be gone"),
]
"""What is switched off, the first seed tried, and the law then broken. Counted from seed 0 eight are found
within 33 seeds, the others at seeds 4429, 150, 5296, 228 and 233: they need two rare things in one schedule."""
NUM_TRIED = 50


@pytest.mark.parametrize(("control", "first", "law"), CONTROLS, ids=lambda each: getattr(each, "__name__", "")[1:])
def test_what_is_switched_off_is_missed(control: Patch, first: int, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the simulation would prove nothing."""
    settings = control(monkeypatch)
    with pytest.raises(Violation, match=law):
        schedule.run_all(range(first, first + NUM_TRIED), **settings)
