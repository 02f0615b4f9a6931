"""Half an hour of kills, stops, restarts, lost messages and clients that leave: right answers or errors, and no more.

`KVFERRY_CHAOS_MINUTES` makes it longer or shorter.
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
from kv_testing.chaos import DECODES, MORTAL, PREFILLS, Chaos, Known, wrong_about
from kv_testing.servers import DEADLINE_S, IS_OURS, LEASE_S, START_S, wait_until
from kv_testing.servers_hooks import bytes_received, open_things, usage

ENGINES = ("P1", "D1")
pytestmark = [
    pytest.mark.parametrize("fleet", ["shm"], indirect=True, scope="session"),
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.long,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(not IS_OURS, reason="other connectors have no hooks"),
]

MINUTES = float(os.environ.get("KVFERRY_CHAOS_MINUTES", "30"))
SURVIVORS = tuple(name for name in (*PREFILLS, *DECODES) if name not in MORTAL)
NUM_QUESTIONS, LONGEST_PROMPT = 60, 400
SETTLED_S = LEASE_S + DEADLINE_S
MAX_GROWTH_MIB = 64.0


def test_every_answer_is_right_or_an_error_and_nothing_stays(fleet, run, fresh_prompt, record_property):
    engines = [fleet.engine(name) for name in (*PREFILLS, *DECODES)]
    router = start_router(fleet.guard, engines[:2], engines[2:], fleet.folder)
    wait_ready([router], timeout_s=START_S)
    dice = Random(int(os.environ.get("KVFERRY_SEED", "0")))
    lengths = [dice.randint(1, LONGEST_PROMPT) for _ in range(NUM_QUESTIONS)]
    known = [_known(fleet, run, Question((fresh_prompt(length),))) for length in lengths]
    resident = [_play(fleet, run, router.url, known, dice, MINUTES * share, record_property) for share in (0.4, 0.6)]
    for name, before in resident[0].items():
        grown = resident[1][name] - before
        record_property(f"resident_mib_{name}", f"{before:.0f} to {resident[1][name]:.0f}")
        assert grown < MAX_GROWTH_MIB, f"{name} has grown by {grown:.0f} MiB"


def _known(fleet, run, question):
    return Known(question, run(lambda client: ask(client, fleet.engine("P1").url, question)))


def _play(fleet, run, router, known, dice, minutes, record_property):
    """One stretch; MiB of memory that each engine which never dies holds at rest after it."""
    chaos = Chaos(fleet, router, known, dice, time.monotonic() + 60 * minutes)
    asyncio.run(chaos.run())
    for what in ("calls", "troubles", "errors"):
        record_property(what, dict(getattr(chaos.log, what)))
    assert not chaos.log.wrong, chaos.log.wrong[:5]
    assert chaos.log.calls["right"] > sum(chaos.log.calls.values()) / 4, chaos.log
    engines = [fleet.engine(name) for name in (*PREFILLS, *DECODES)]
    waited = wait_until(lambda: not any(open_things(each) or usage(each) for each in engines), timeout_s=SETTLED_S)
    assert waited <= SETTLED_S, [(each.name, open_things(each), usage(each)) for each in engines]
    for prefill, decode in itertools.product(PREFILLS, DECODES):
        _hand_over(fleet, run, dice.choice(known), prefill, decode)
    return {name: _resident_mib(fleet.engine(name)) for name in SURVIVORS}


def _hand_over(fleet, run, known, prefill, decode):
    """The next request between any two travels, and is answered right."""
    engines, before = (fleet.engine(prefill).url, fleet.engine(decode).url), bytes_received(fleet.engine(decode))
    answers = run(lambda client: ask_by_hand(client, *engines, known.question, salt=secrets.token_hex(8)))
    assert wrong_about(answers, known) is None
    assert bytes_received(fleet.engine(decode)) > before or len(known.question.prompts[0]) == 1


def _resident_mib(engine):
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in engine.program.members())
    return pages * resource.getpagesize() / 2**20
