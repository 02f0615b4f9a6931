"""The page of modules names every module of every package, each with its first sentence, and nothing else."""

import pytest
from docs import modules


def test_the_page_is_what_the_tool_writes():
    assert modules.FILE.read_text() == modules.text(), "python tools/docs/modules.py"


def test_every_module_has_a_first_sentence():
    found = {
        (package, name): said
        for package, source in modules.SOURCES.items()
        for name, said in modules.modules(source).items()
    }
    assert len(found) > 200
    assert [each for each, said in found.items() if not said.endswith(".")] == []


def test_a_module_that_nobody_places_is_missed(tmp_path):
    source = modules.SOURCES["kv_kernels"]
    for path in source.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "new.py").write_text('"""Something new."""\n')
    with pytest.raises(ValueError, match="no group of tools/docs/modules.py names: new"):
        list(modules.grouped("kv_kernels", modules.modules(tmp_path)))
    (tmp_path / "new.py").unlink()
    (tmp_path / "peer.py").unlink()
    with pytest.raises(ValueError, match="no such module, or in two groups: peer in 'Copies'"):
        list(modules.grouped("kv_kernels", modules.modules(tmp_path)))


def test_the_four_packages_are_there():
    assert modules.SOURCES.keys() == modules.GROUPS.keys()
    assert all((source / "__init__.py").exists() for source in modules.SOURCES.values())
