"""Tests each package in an environment of its own, so that what it does not declare it cannot use.

In:  the four packages as wheels, their declared requirements, and the tests of each.
Out: one pytest run a package, as many at a time as there are cores, each told as a whole when it has ended; exit
     status 1 if any of them failed.
Law: an environment holds the package, what it declares, and what tests need (pytest, Hypothesis; numpy for Triton's
     interpreter), nothing else. kv_core's holds no torch, which is asserted.

Tests of a package that need an optional extra carry its marker (`nixl`, `vllm`, `prometheus`) and are left out here.

Usage: .venv/bin/python tools/check_packages.py [--only kv-core]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))  # so that it runs as a script and imports as `check_packages`

from environment.make_venv import manifest, name_of  # noqa: E402
from environment.venvs import CONSTRAINTS, Venv, fingerprint, step  # noqa: E402

TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")


@dataclass(frozen=True, slots=True)
class Package:
    """One distribution, where it lies, whose wheels it stands on, and which tests prove it."""

    name: str
    folder: str
    tests: str
    stands_on: tuple[str, ...] = ()
    test_requirements: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


PACKAGES = {  # the longest tests first, since several run at a time
    package.name: package
    for package in (
        Package(
            "kv-transfer",
            "packages/kv-transfer",
            "tests/transfer",
            stands_on=("kv-core", "kv-kernels"),
            test_requirements=("numpy",),
            absent=("nixl", "vllm", "kv_engine_adapter"),
        ),
        Package("kv-core", "packages/kv-core", "tests/core", absent=("torch", "triton", "zmq", "numpy")),
        Package("kv-kernels", "kernels", "tests/kernels", test_requirements=("numpy",), absent=("kv_core", "zmq")),
        Package(
            "kv-engine-adapter",
            "packages/kv-engine-adapter",
            "tests/adapter",
            stands_on=("kv-core", "kv-kernels", "kv-transfer"),
            test_requirements=("numpy", "safetensors"),
            absent=("nixl", "vllm", "transformers"),
        ),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Test each package in an environment of its own.")
    parser.add_argument("--only", action="append", choices=PACKAGES, help="a package to test (default: all)")
    chosen = [PACKAGES[name] for name in parser.parse_args().only or PACKAGES]
    with tempfile.TemporaryDirectory(prefix="kvferry-wheels-") as wheels:
        build_wheels(Path(wheels))
        passed = check_all(chosen, Path(wheels))
    print(*(f"{name:20} {'passed' if ok else 'FAILED'}" for name, ok in passed.items()), sep="\n", flush=True)
    sys.exit(not all(passed.values()))


def check_all(packages: Sequence[Package], wheels: Path) -> dict[str, bool]:
    """Whether each package passed."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        verdicts = pool.map(lambda package: check(package, wheels), packages)
        return {package.name: passed for package, passed in zip(packages, verdicts, strict=True)}


def build_wheels(target: Path) -> None:
    """Wheels of all four packages, built by the tools in the main environment."""
    folders = [ROOT / package.folder for package in PACKAGES.values()]
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(target),
        *map(str, folders),
    ]
    with step("building four wheels"):
        subprocess.run(command, check=True)


def check(package: Package, wheels: Path) -> bool:
    """Whether the package's tests pass where only its wheel, its requirements and the test tools are installed."""
    started = time.monotonic()
    venv = Venv(ROOT / ".venvs" / package.name)
    asked = [*requirements(package), *TEST_TOOLS, *package.test_requirements]
    venv.refresh(fingerprint(ROOT, asked, CONSTRAINTS.read_text()), lambda it: it.pip(*asked))
    venv.pip("--no-deps", "--no-index", "--force-reinstall", *(str(wheel) for wheel in wheels_of(package, wheels)))
    prove_absence(venv, package)
    ready = time.monotonic()
    command = [str(venv.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", selection(), package.tests]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    spent = f"environment {ready - started:.0f} s, tests {time.monotonic() - ready:.0f} s"
    print(f"== {package.name}\n{ended.stdout}  {package.tests}: {spent}", flush=True)
    return ended.returncode == 0


def requirements(package: Package) -> list[str]:
    """What the package and those it stands on declare, without our own packages."""
    projects = [manifest(ROOT / PACKAGES[name].folder)["project"] for name in (*package.stands_on, package.name)]
    return sorted({it for project in projects for it in project["dependencies"] if name_of(it) not in PACKAGES})


def wheels_of(package: Package, wheels: Path) -> list[Path]:
    names = [name.replace("-", "_") for name in (*package.stands_on, package.name)]
    return [found for name in names for found in wheels.glob(f"{name}-*.whl")]


def prove_absence(venv: Venv, package: Package) -> None:
    """Exits if a module that the package must do without can be found."""
    code = f"import importlib.util as u; print(*(name for name in {package.absent!r} if u.find_spec(name)))"
    found = venv.output_of(code).split()
    if found:
        sys.exit(f"the environment of {package.name} holds what the package must do without: {found}")


def selection() -> str:
    left_out = ("gpu", "multi_gpu", "long", "nixl", "vllm", "prometheus", "drawn", "patient")
    return " and ".join(f"not {marker}" for marker in left_out)


if __name__ == "__main__":
    main()
