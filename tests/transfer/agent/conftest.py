"""Agents for the contract suite: each test runs over every kind, and every agent it made is closed after it."""

import subprocess
import sys

import pytest

from kv_transfer.agent.base import Agent
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.agent.nixl import NixlConfig, nixl_agent
from kv_transfer.agent.pump import PumpLimits


@pytest.fixture(params=["loopback", pytest.param("nixl", marks=pytest.mark.nixl)])
def make_agent(request):
    """A function that makes an agent: (name, limits) -> Agent."""
    hub = LoopbackHub()
    made: list[Agent] = []

    def make(name=None, limits=None):
        limits = limits or PumpLimits()
        if request.param == "loopback":
            made.append(hub.agent(name, limits))
        else:
            made.append(nixl_agent(NixlConfig(limits=limits), name))
        return made[-1]

    yield make
    assert all([agent.close(5) for agent in made])


@pytest.fixture
def run_python():
    """A function that runs code in a fresh interpreter and gives what it printed."""

    def run(code: str) -> str:
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
        return done.stdout.strip()

    return run
