"""The two published traces: their ceilings, what each eviction order finds of them, and how long a replay takes."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from kv_core.replay import BELADY, Setting, replay
from kv_core.trace import ceiling_hits, read_trace

TRACES = Path(__file__).resolve().parents[2] / "tools" / "data"


@cache
def trace(name):
    return list(read_trace(TRACES / f"mooncake_{name}_trace.jsonl"))


@pytest.mark.parametrize(
    ("name", "num_requests", "rate"), [("conversation", 12_031, 0.366), ("synthetic", 3_993, 0.64)]
)
def test_what_can_be_found_at_all(name, num_requests, rate):
    requests = trace(name)
    num_blocks = sum(len(one.blocks) for one in requests)
    assert len(requests) == num_requests
    assert ceiling_hits(requests) / num_blocks == pytest.approx(rate, abs=0.0005)


def test_orders_of_eviction_under_the_ceiling_of_their_capacity():
    """As docs/tuning.md tells it: a small cache gains from resisting scans, and nobody beats who knows the future."""
    orders = ("lru", "s3-fifo", BELADY)
    rates = [found.hit_rate for found in replay(trace("synthetic"), [Setting(order, 2000) for order in orders])]
    assert rates == pytest.approx([0.141, 0.144, 0.374], abs=0.0005)


def test_a_trace_of_12_000_requests_is_replayed_in_under_a_minute():
    (found,) = replay(trace("conversation"), [Setting("lru", 8000)])
    assert found.hit_rate == pytest.approx(0.172, abs=0.0005)
    assert found.seconds < 60


def test_it_runs_as_a_module():
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "kv_core.replay",
        str(TRACES / "mooncake_synthetic_trace.jsonl"),
    ]
    ended = subprocess.run([*command, "--requests", "100", "--order", "lru"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == 2 + 4, "four capacities unless others are named"
    assert "kv_core.manager" in ended.stderr
    assert "torch" not in ended.stderr
