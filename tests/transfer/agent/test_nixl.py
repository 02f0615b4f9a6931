"""What is special about NIXL agents, in one process."""

import importlib

import numpy as np
import pytest
import torch

from kv_transfer.agent import nixl
from kv_transfer.agent.nixl import NixlConfig, NixlMissing, nixl_agent, shares_memory
from kv_transfer.agent.transport import TransportError
from kv_transfer.regions import Region, host_region


def test_a_missing_library_is_said_with_the_way_to_get_it(monkeypatch) -> None:
    def missing(name: str):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(NixlMissing, match=r"pip install 'kv-transfer\[nixl\]'"):
        nixl_agent()


def test_importing_the_agent_does_not_import_the_library(run_python) -> None:
    assert run_python("import sys, kv_transfer.agent.nixl; print('nixl._bindings' in sys.modules)") == "False"


@pytest.mark.nixl
def test_transports_that_ucx_cannot_start_are_said(monkeypatch) -> None:
    monkeypatch.setenv("UCX_TLS", "posix")
    with pytest.raises(TransportError, match="NIXL cannot start UCX"):
        nixl_agent()


@pytest.mark.nixl
def test_a_region_that_cannot_be_registered_stays_unregistered() -> None:
    agent = nixl_agent(NixlConfig(device=torch.device("cpu")))
    real = host_region(100)
    unreal = Region(0, 100, "device", 99, real.memory)
    with pytest.raises(TransportError, match="NIXL cannot register"):
        agent.register(unreal)
    agent.register(real)
    assert agent.close(5)


def test_long_lists_are_shortened_in_messages() -> None:
    assert (
        nixl._brief(np.array([(16 * i, 8, 0) for i in range(5)], dtype=np.uint64))
        == "[0x0, 0x8), [0x10, 0x18), [0x20, 0x28) and 2 more"
    )


@pytest.mark.parametrize(
    ("transports", "is_shared"),
    [
        (None, True),
        ("all", True),
        ("tcp", False),
        ("tcp,cuda_copy", False),
        ("shm,tcp", True),
        ("self, posix", True),
        ("^tcp", True),
        ("^shm", False),
        ("^sm,cuda", False),
    ],
)
def test_shared_memory_is_used_as_far_as_ucx_may(transports, is_shared):
    assert shares_memory(transports) == is_shared
