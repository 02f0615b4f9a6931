"""Who imports whom: what loads in a fresh process, and what the static contracts see, each with planted violations.

The static contracts miss one hole: a parent package always runs first, so an import in `kv_transfer/__init__.py` would
reach `kv_transfer.protocol` although no line of it says so. Hence the subprocesses.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    ROOT / "packages/kv-core/src",
    ROOT / "kernels/src",
    ROOT / "packages/kv-transfer/src",
    ROOT / "packages/kv-engine-adapter/src",
]
HEAVY = ("torch", "triton", "nixl", "nixl_cu13", "vllm", "numpy")
LIGHT = (
    "kv_core",
    "kv_transfer",
    "kv_transfer.plan",
    "kv_transfer.protocol",
    "kv_transfer.agent.cards",
    "kv_transfer.config",
    "kv_transfer.instance",
    "kv_transfer.orders",
    "kv_transfer.prefix_store.chain",
    "kv_transfer.prefix_store.header",
    "kv_transfer.prefix_store.holdings",
    "kv_engine_adapter",
    "kv_engine_adapter.config",
    "kv_engine_adapter.handover",
    "kv_engine_adapter.orders",
    "kv_engine_adapter.scheduler",
    "kv_engine_adapter.tier",
)
WHOLE = {"kv_core", "kv_transfer.plan", "kv_transfer.protocol"}  # these are walked: all their modules are light

PROBE = """
import importlib, pkgutil, sys
name, walked = sys.argv[1], sys.argv[2] == "whole"
module = importlib.import_module(name)
if walked:
    for found in pkgutil.walk_packages(module.__path__, name + "."):
        importlib.import_module(found.name)
print(*sorted(set(sys.argv[3:]) & set(sys.modules)))
"""


def heavy_modules_loaded_by(name, source=None):
    """Which heavy modules a fresh process holds after importing `name`; `source` goes before the installed packages."""
    environment = os.environ | ({"PYTHONPATH": str(source)} if source else {})
    command = [sys.executable, "-c", PROBE, name, "whole" if name in WHOLE else "alone", *HEAVY]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


@pytest.mark.parametrize("name", LIGHT)
def test_a_deciding_module_loads_nothing_heavy(name):
    assert heavy_modules_loaded_by(name) == []


def test_the_probe_sees_a_leak_through_a_parent_package(tmp_path):
    shutil.copytree(ROOT / "packages/kv-transfer/src", tmp_path, dirs_exist_ok=True)
    (tmp_path / "kv_transfer/__init__.py").write_text("import torch\n")
    (tmp_path / "torch.py").write_text("")
    assert heavy_modules_loaded_by("kv_transfer.protocol", tmp_path) == ["torch"]


def lint_imports(source=None):
    environment = os.environ | ({"PYTHONPATH": str(source)} if source else {})
    program = str(Path(sys.executable).with_name("lint-imports"))
    command = [program, "--no-logo", "--no-cache", str(ROOT / "pyproject.toml")]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def copied_sources(tmp_path):
    """A copy of all packages that shadows the installed ones when it is in PYTHONPATH."""
    for source in SOURCES:
        shutil.copytree(source, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_import_contracts_hold():
    ended = lint_imports()
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize(
    ("module", "violation", "broken"),
    [
        ("kv_core/spans.py", "import kv_kernels", "Packages"),
        ("kv_kernels/reference.py", "import kv_core.ids", "Packages"),
        ("kv_transfer/plan/plan.py", "import kv_engine_adapter.orders", "Packages"),
        ("kv_core/ids.py", "import kv_core.keys", "Inside kv_core"),
        ("kv_transfer/staging.py", "import kv_transfer.agent.base", "Inside kv_transfer"),
        ("kv_transfer/plan/plan.py", "import kv_transfer.protocol.codec", "Inside kv_transfer"),
        ("kv_engine_adapter/worker.py", "import kv_engine_adapter.scheduler", "Inside kv_engine_adapter"),
        ("kv_transfer/protocol/messages.py", "import torch", "The deciding parts"),
        ("kv_engine_adapter/orders.py", "import kv_transfer.regions", "The deciding parts"),
        ("kv_engine_adapter/worker.py", "import nixl", "One door to NIXL"),
        ("kv_transfer/agent/pump.py", "import nixl", "One door to NIXL"),
        ("kv_transfer/regions.py", "import vllm", "One folder for vLLM"),
        ("kv_transfer/regions.py", "import triton", "Triton lives in the kernels"),
    ],
)
def test_a_planted_import_breaks_its_contract(copied_sources, module, violation, broken):
    planted = copied_sources / module
    planted.write_text(planted.read_text() + f"\n{violation}\n")
    ended = lint_imports(copied_sources)
    verdicts = [line for line in ended.stdout.splitlines() if line.startswith(broken) and "BROKEN" in line]
    assert ended.returncode == 1, ended.stdout
    assert verdicts, ended.stdout


def test_no_other_file_imports_nixl_by_name_at_run_time():
    files = [file for source in SOURCES for file in source.rglob("*.py")]
    doors = [file.name for file in files if re.search(r"import(_module|lib\..*)?\(\s*[\"']nixl", file.read_text())]
    assert doors == ["nixl.py"]
