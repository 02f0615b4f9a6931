"""Engines with different weights of one shape exchange no cache: the reason names both, the policy decides the rest."""

import re

import pytest

from kv_testing.answers import Question, RefusedError, ask, ask_with, prefill_only
from kv_testing.servers import DEADLINE_S, IS_OURS, SHARED_MEMORY_FIRST, wait_until
from kv_testing.servers_hooks import bytes_received, open_things

ENGINES = ("P1", "X1", "D1", "D2")
pytestmark = [
    SHARED_MEMORY_FIRST,
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_OURS, reason="other connectors compare shapes, not weights"),
]


def test_recompute_answers_right(fleet, run, tally, fresh_prompt):
    question = Question((fresh_prompt(101),))
    params = run(lambda client: prefill_only(client, fleet.engine("X1").url, question))
    before = bytes_received(fleet.engine("D1"))
    answers = run(lambda client: ask_with(client, fleet.engine("D1").url, question, params))
    tally.demand_right(answers, run(lambda client: ask(client, fleet.engine("P1").url, question)))
    assert bytes_received(fleet.engine("D1")) == before
    _check_reason(fleet, "D1")


def test_fail_tells_the_client(fleet, run, fresh_prompt):
    question = Question((fresh_prompt(101),))
    params = run(lambda client: prefill_only(client, fleet.engine("X1").url, question))
    with pytest.raises(RefusedError) as refused:
        run(lambda client: ask_with(client, fleet.engine("D2").url, question, params))
    # vLLM's own words to the client; why, it leaves to the log.
    assert (refused.value.status, refused.value.kind) == (500, "InternalServerError")
    _check_reason(fleet, "D2")


def _check_reason(fleet, name):
    """The log of the refusing engine names both fingerprints, and nothing stays open."""
    log = fleet.engine(name).program.log.read_text()
    pairs = set(re.findall(r"fingerprint.{0,40}ours=\W*(\w{16,})\W+theirs=\W*(\w{16,})", log))
    assert pairs, f"no line with both fingerprints in the log of {name}"
    assert all(ours != theirs for ours, theirs in pairs), pairs
    assert wait_until(lambda: not open_things(fleet.engine(name)), timeout_s=DEADLINE_S) < DEADLINE_S
