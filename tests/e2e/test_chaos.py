"""Half an hour of kills, stops, restarts, lost messages and clients that leave: right answers or errors, and no more.

Once between engines that hand over, and once where they keep prefixes in tiers as well, on a disk that is harmed, full,
failing and hanging. `KVFERRY_CHAOS_MINUTES` makes it longer or shorter.
"""

import asyncio
import itertools
import os
import resource
import secrets
import time
from pathlib import Path
from random import Random

import pytest

from kv_engine_adapter.cli.engines import start_router, wait_ready
from kv_testing.answers import Question, ask, ask_by_hand
from kv_testing.chaos import Cast, Chaos, Known, wrong_about
from kv_testing.disk_trouble import num_bytes
from kv_testing.servers import DEADLINE_S, IS_OURS, LEASE_S, START_S, TIER_DISK_BYTES, wait_until
from kv_testing.servers_hooks import bytes_received, open_things, usage
from kv_testing.tier_servers import ask as ask_tiers

ENGINES = ()
pytestmark = [
    pytest.mark.parametrize("fleet", ["shm"], indirect=True, scope="session"),
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.long,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(not IS_OURS, reason="other connectors have no hooks"),
]

MINUTES = float(os.environ.get("KVFERRY_CHAOS_MINUTES", "30"))
NUM_QUESTIONS, LONGEST_PROMPT = 60, 400
SETTLED_S = LEASE_S + DEADLINE_S
MAX_GROWTH_MIB = 64.0
TIER_COUNTERS = ("hit_tokens", "saved_tokens", "fetched_tokens", "written_tokens", "failures", "disk_errors")


def test_every_answer_is_right_or_an_error_and_nothing_stays(fleet, run, fresh_prompt, record_property):
    cast = Cast(("VP1", "VQ1"), ("VD1", "VE1"), mortal=("VQ1", "VE1"))
    _survive(fleet, cast, run, fresh_prompt, record_property)


def test_with_tiers_on_a_disk_that_fails_too(fleet, run, fresh_prompt, record_property):
    cast = Cast(("TP1", "TQ1"), ("TD1", "TE1"), mortal=("TQ1", "TE1"), disk=fleet.disk)
    _survive(fleet, cast, run, fresh_prompt, record_property)
    counted = {
        name: sum(fleet.engine(each).metrics().get(f"kvferry:tier_{name}_total", 0.0) for each in cast.survivors)
        for name in TIER_COUNTERS
    }
    record_property("tiers of those that were never killed", counted)
    assert all(counted.values()), f"something was never met: {counted}"


def _survive(fleet, cast, run, fresh_prompt, record_property):
    engines = [fleet.engine(name) for name in cast.names]
    router = start_router(fleet.guard, engines[: len(cast.prefills)], engines[len(cast.prefills) :], fleet.folder)
    wait_ready([router], timeout_s=START_S)
    dice = Random(int(os.environ.get("KVFERRY_SEED", "0")))
    lengths = [dice.randint(1, LONGEST_PROMPT) for _ in range(NUM_QUESTIONS)]
    known = [_known(engines[0], run, Question((fresh_prompt(length),))) for length in lengths]
    stretches = [MINUTES * share for share in (0.4, 0.6)]
    resident = [_play(fleet, cast, run, router.url, known, dice, each, record_property) for each in stretches]
    for name, before in resident[0].items():
        grown = resident[1][name] - before
        record_property(f"resident_mib_{name}", f"{before:.0f} to {resident[1][name]:.0f}")
        assert grown < MAX_GROWTH_MIB, f"{name} has grown by {grown:.0f} MiB"


def _known(engine, run, question):
    return Known(question, run(lambda client: ask(client, engine.url, question)))


def _play(fleet, cast, run, router, known, dice, minutes, record_property):
    """One stretch; MiB of memory that each engine which never dies holds at rest after it."""
    chaos = Chaos(fleet, cast, router, known, dice, time.monotonic() + 60 * minutes)
    asyncio.run(chaos.run())
    for what in ("calls", "routed", "troubles", "errors"):
        record_property(what, dict(getattr(chaos.log, what)))
    assert not chaos.log.wrong, chaos.log.wrong[:5]
    for calls in (chaos.log.calls, chaos.log.routed):
        assert calls["right"] > sum(calls.values()) / 4, chaos.log
    engines = [fleet.engine(name) for name in cast.names]
    waited = wait_until(lambda: not any(_open(each, cast) or usage(each) for each in engines), timeout_s=SETTLED_S)
    assert waited <= SETTLED_S, [(each.name, _open(each, cast), usage(each)) for each in engines]
    if cast.disk is not None:
        record_property("MiB on disk", f"{num_bytes(cast.disk) / 2**20:.0f}")
        assert num_bytes(cast.disk) <= TIER_DISK_BYTES
    for prefill, decode in itertools.product(cast.prefills, cast.decodes):
        _hand_over(fleet, run, dice.choice(known), prefill, decode)
        _route(run, router, dice.choice(known))
    return {name: _resident_mib(fleet.engine(name)) for name in cast.survivors}


def _open(engine, cast):
    if cast.disk is None:
        return open_things(engine)
    ask_tiers(engine.url, (16, 17), 1)  # what the disk has done is told with the engine's next step
    jobs = engine.metrics()["kvferry:tier_jobs"]
    return open_things(engine) | ({"kvferry:tier_jobs": jobs} if jobs else {})


def _hand_over(fleet, run, known, prefill, decode):
    """The next request between any two travels, and is answered right."""
    engines, before = (fleet.engine(prefill).url, fleet.engine(decode).url), bytes_received(fleet.engine(decode))
    answers = run(lambda client: ask_by_hand(client, *engines, known.question, salt=secrets.token_hex(8)))
    assert wrong_about(answers, known) is None
    assert bytes_received(fleet.engine(decode)) > before or len(known.question.prompts[0]) == 1


def _route(run, router, known):
    """The router has come through it too."""
    answers = run(lambda client: ask(client, router, known.question, salt=secrets.token_hex(8)))
    assert wrong_about(answers, known) is None


def _resident_mib(engine):
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in engine.program.members())
    return pages * resource.getpagesize() / 2**20
