"""The Triton kernels as they run without a GPU: under Triton's interpreter."""

import importlib
import sys
from types import ModuleType
from typing import NamedTuple

import pytest

import kv_kernels

DEVICE_CODE = ("paged_copy", "gather", "scatter", "block_copy", "peer", "weighted_sum")


class Kernels(NamedTuple):
    gather: ModuleType
    scatter: ModuleType
    block_copy: ModuleType
    peer: ModuleType
    weighted_sum: ModuleType


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Fresh copies of the kernel modules, compiled for the interpreter; the real ones come back afterwards."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in DEVICE_CODE:
        module = importlib.import_module(f"kv_kernels.{name}")
        monkeypatch.setattr(kv_kernels, name, module)
        monkeypatch.delitem(sys.modules, f"kv_kernels.{name}")
    # The kernel first: the launchers find it as an attribute of the package.
    _, *launchers = [importlib.import_module(f"kv_kernels.{name}") for name in DEVICE_CODE]
    return Kernels(*launchers)
