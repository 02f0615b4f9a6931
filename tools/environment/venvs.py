"""Virtual environments that are rebuilt exactly when what they hold has changed.

In:  a folder and a key (a hash of everything that decides the content).
Out: a working environment whose stamp is the key.
Law: a stamp is written last and removed first, so an interrupted build is never taken for a finished one.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
_STAMP = ".kvferry-stamp"
_NUM_SHOWN_LINES = 30


def fingerprint(*parts: object) -> str:
    """A hash of plain values, equal for equal values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Venv:
    """One virtual environment; all installs obey constraints.txt and are logged in its `setup.log`."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def is_stamped(self, key: str) -> bool:
        stamp = self.folder / _STAMP
        return self.python.exists() and stamp.is_file() and stamp.read_text() == key

    def refresh(self, key: str, install: Callable[["Venv"], None]) -> None:
        """Stamps the environment with `key` once `install` has succeeded; one process at a time."""
        locks = ROOT / ".work" / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / self.folder.name).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.is_stamped(key):  # another process has done it while we waited
                return
            (self.folder / _STAMP).unlink(missing_ok=True)
            self._create_unless_usable()
            install(self)
            (self.folder / _STAMP).write_text(key)

    def pip(self, *arguments: str, constrained: bool = True) -> None:
        """`pip install` with these arguments; on failure exits with the end of pip's own words."""
        constraints = ["-c", str(CONSTRAINTS)] if constrained else []
        # Why not compile: the engine alone brings 20,000 files, of which one run imports a tenth.
        command = [str(self.python), "-m", "pip", "install", "--no-compile", *constraints, *arguments]
        log = self.folder / "setup.log"
        with log.open("a") as stream:
            print("$", *command, file=stream, flush=True)
            ended = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, env=_environment(), cwd=ROOT)
        if ended.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_NUM_SHOWN_LINES:])
            sys.exit(f"{tail}\n\npip failed; the whole log is {log}")

    def output_of(self, code: str) -> str:
        """What a Python snippet prints when run in this environment; exits with its error if it fails."""
        ended = subprocess.run(
            [self.python, "-c", code], capture_output=True, text=True, env=_environment(), cwd=self.folder
        )
        if ended.returncode:
            sys.exit(f"{ended.stderr.strip()}\n\nThis failed in {self.folder}. `make clean setup` starts afresh.")
        return ended.stdout

    def _create_unless_usable(self) -> None:
        if self._is_usable():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        base = getattr(sys, "_base_executable", sys.executable)  # why: we may run inside the environment to replace
        ended = subprocess.run([base, "-m", "venv", self.folder], capture_output=True, text=True)
        if ended.returncode:
            shutil.rmtree(self.folder, ignore_errors=True)
            sys.exit(
                f"{ended.stdout}{ended.stderr}\n{base} cannot make virtual environments. On Debian and Ubuntu install "
                f"python3.{sys.version_info.minor}-venv, or choose another Python: make PYTHON=..."
            )

    def _is_usable(self) -> bool:
        if not self.python.exists():
            return False
        probe = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
        return subprocess.run([self.python, "-c", probe], capture_output=True).returncode == 0


@contextmanager
def step(title: str) -> Iterator[None]:
    """Announces a step and then how long it took."""
    print(f"  {title} ...", end="", flush=True)
    started = time.monotonic()
    yield
    print(f" {time.monotonic() - started:.0f} s", flush=True)


def _environment() -> dict[str, str]:
    """Ours, without what would make pip or Python look elsewhere."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONHOME", "PYTHONPATH", "PIP_TARGET"}}
    return kept | {"PIP_USER": "0", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
