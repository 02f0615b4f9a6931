"""The Python sources of vLLM versions that are not installed, for tests that only read them.

In:  a version.
Out: the folder in which its `vllm` package lies; fetched from the package index when it is asked for first.
Law: nothing is installed or imported; no other file of the wheel is kept.

Usage: .venv/bin/python tools/environment/vllm_sources.py 0.25.1 0.33.0
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".work" / "vllm-sources"
TIMEOUT_S = 900


def sources_of(version: str) -> Path:
    """Where the sources of this version are. Raises CalledProcessError if the index has no wheel of it."""
    folder = KEPT / version
    if not folder.exists():
        with tempfile.TemporaryDirectory() as scratch:
            _unpack(_wheel(version, Path(scratch)), folder)
    return folder


def _wheel(version: str, folder: Path) -> Path:
    words = ["download", "-q", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), f"vllm=={version}"]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=TIMEOUT_S)
    (found,) = folder.glob("*.whl")
    return found


def _unpack(wheel: Path, folder: Path) -> None:
    """All or nothing: a folder that exists is whole."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as scratch, zipfile.ZipFile(wheel) as archive:
        whole = Path(scratch, "whole")
        archive.extractall(whole, [name for name in archive.namelist() if name.endswith(".py")])
        whole.rename(folder)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(each, sources_of(each))
