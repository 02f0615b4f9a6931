"""docs/api.md names what is there: every name of ours in it can be imported."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import kv_core
from kv_core.manager import KVCacheManager

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(r"^\| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
MODULES = {
    info.name: importlib.import_module(f"kv_core.{info.name}") for info in pkgutil.iter_modules(kv_core.__path__)
}
NAMED = sorted({name for row in ROWS for name in re.findall(r"`([^`(]+)[^`]*`", row[2])})


def found(name):
    """Whether a module of ours, the manager, or a class or function of any module of kv_core has this name."""
    first, _, rest = name.partition(".")
    if first == "kv_transfer":
        return (ROOT / f"packages/kv-transfer/src/kv_transfer/{rest.replace('.', '/')}.py").is_file()
    if first == "manager" and hasattr(KVCacheManager, rest):
        return True
    if first in MODULES:
        return not rest or hasattr(MODULES[first], rest)
    return any(not rest or hasattr(vars(module)[first], rest) for module in MODULES.values() if first in vars(module))


@pytest.mark.parametrize("name", NAMED)
def test_the_name_exists(name):
    assert found(name)


def test_a_name_that_is_not_there_is_noticed():
    assert not found("manager.pinBlocks")
    assert not found("Run.shifted")
    assert not found("Unheard")


def test_every_row_has_the_rule_it_follows_and_something_of_ours():
    assert len(ROWS) > 60
    for seed, section, ours in ROWS[1:]:
        if seed not in ("seed", "---") and not set(section) <= {"-"}:
            assert re.search(r"\d", section) or section == "section", seed
            assert "`" in ours or section == "section", seed
