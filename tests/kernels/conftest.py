"""The Triton kernels as they run without a GPU: under Triton's interpreter."""

import importlib
import sys
from types import ModuleType
from typing import NamedTuple

import pytest

import kv_kernels

DEVICE_CODE = ("weighted_sum", "paged_copy", "gather", "scatter", "block_copy", "peer", "block_table")


class Kernels(NamedTuple):
    gather: ModuleType
    scatter: ModuleType
    block_copy: ModuleType
    peer: ModuleType
    weighted_sum: ModuleType
    block_table: ModuleType


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Fresh copies of the kernel modules, compiled for the interpreter; the real ones come back afterwards."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in DEVICE_CODE:
        module = importlib.import_module(f"kv_kernels.{name}")
        monkeypatch.setattr(kv_kernels, name, module)
        monkeypatch.delitem(sys.modules, f"kv_kernels.{name}")
    # Kernels first: the launchers find them as attributes of the package.
    made = {name: importlib.import_module(f"kv_kernels.{name}") for name in DEVICE_CODE}
    return Kernels(**{name: made[name] for name in Kernels._fields})
