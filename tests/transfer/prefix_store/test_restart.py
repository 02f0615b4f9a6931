"""What is there after a restart, for whom, and how much of it is remembered; who may use what is on the disk."""

import os
import re
import stat
import struct
import zlib
from pathlib import Path

import pytest

from kv_core.spans import Span
from kv_testing.stores import config_of, cut, full_world, misses, num_wrong, prompt, read_all, record_files, write_all
from kv_testing.tagged import make_world
from kv_transfer.prefix_store.header import HEADER_BYTES
from kv_transfer.prefix_store.index import Index
from kv_transfer.prefix_store.names import key_folder
from kv_transfer.prefix_store.store import PrefixStore

STATE = cut()


def kept(directory, state=STATE, num_tokens=40, **config):
    store = PrefixStore(config_of(directory, **config), state)
    write_all(store, store.chain(prompt(num_tokens)), full_world(state, num_tokens), Span(0, num_tokens))
    store.close()


def test_a_restart_finds_everything_without_looking_for_it(tmp_path, monkeypatch):
    kept(tmp_path)
    store, target = PrefixStore(config_of(tmp_path), STATE), make_world(STATE, 40, "CBTHD", 2)
    monkeypatch.setattr("kv_transfer.prefix_store.index.records_in", lambda folder: pytest.fail(f"looked at {folder}"))
    assert store.lookup(store.chain(prompt(40))) == 40
    assert read_all(store, store.chain(prompt(40)), target, Span(0, 40)) == {40}
    assert num_wrong(target, Span(0, 40)) == 0


@pytest.mark.parametrize(
    ("state", "config", "why"),
    [
        (cut(fingerprint="another checkpoint"), {}, "other_model"),
        (cut(dtype="bfloat16"), {}, "other_model"),
        (cut(head_size=8), {}, "other_model"),
        (STATE, {"hash_rule": "sha256, seed 7"}, "other_hash_rule"),
    ],
)
def test_what_others_kept_is_a_counted_miss(tmp_path, state, config, why):
    kept(tmp_path)
    store, target = PrefixStore(config_of(tmp_path, **config), state), make_world(state, 40, "CBTHD", 2)
    chain = store.chain(prompt(40))
    assert store.lookup(chain) == 0
    assert misses(store, "lookup") == {why: 1}
    assert read_all(store, chain, target, Span(0, 40)) == {0}
    assert num_wrong(target, Span(0, 0)) == 0
    back = PrefixStore(config_of(tmp_path), STATE)
    assert back.lookup(chain) == 40
    assert misses(back, "lookup") == {}


def test_an_older_format_is_a_counted_miss(tmp_path):
    kept(tmp_path)
    (ours,) = (tmp_path / "store").glob("v1-*")
    ours.rename(ours.with_name(ours.name.replace("v1", "v0")))
    store = PrefixStore(config_of(tmp_path), STATE)
    assert store.lookup(store.chain(prompt(40))) == 0
    assert misses(store, "lookup") == {"other_format": 1}


@pytest.mark.parametrize(
    ("at", "why"), [(8, "other_format"), (16, "other_hash_rule"), (48, "other_model"), (80, "other_content")]
)
def test_a_sound_header_of_something_else_in_our_place(tmp_path, at, why):
    """Even if a whole directory was copied to a wrong name."""
    kept(tmp_path, num_tokens=16)
    (path,) = record_files(tmp_path / "store")
    content = bytearray(path.read_bytes())
    content[at] ^= 2
    content[HEADER_BYTES - 4 : HEADER_BYTES] = struct.pack("<I", zlib.crc32(content[: HEADER_BYTES - 4]))
    path.write_bytes(content)
    store, target = PrefixStore(config_of(tmp_path), STATE), make_world(STATE, 16, "CBTHD", 2)
    assert read_all(store, store.chain(prompt(16)), target, Span(0, 16)) == {0}
    assert misses(store, "read") == {why: 1}
    assert num_wrong(target, Span(0, 0)) == 0


def test_the_index_remembers_so_many_keys_and_finds_all_the_same(tmp_path):
    kept(tmp_path, num_tokens=160)
    store = PrefixStore(config_of(tmp_path, max_indexed=3), STATE)
    index = store._holdings.index
    assert len(index) == 3
    chain = store.chain(prompt(160))
    for _ in range(2):
        assert store.lookup(chain) == 160
        assert len(index) == 3


def test_at_the_start_the_latest_used_are_remembered(tmp_path):
    kept(tmp_path, num_tokens=160)
    store = PrefixStore(config_of(tmp_path), STATE)
    namespace, chain = store._holdings.shelf.namespace, store.chain(prompt(160))
    for ordinal in range(10):
        (path,) = (namespace / key_folder(chain.key(ordinal, 16))).iterdir()
        os.utime(path, (1000 + ordinal * 7 % 10,) * 2)
    latest = sorted(range(10), key=lambda ordinal: ordinal * 7 % 10)[-4:]
    assert set(Index(namespace, 4)._names) == {chain.key(ordinal, 16) for ordinal in latest}


def test_files_and_directories_are_their_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        kept(tmp_path)
    finally:
        os.umask(before)
    found = [tmp_path / "store", *(tmp_path / "store").rglob("*")]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in found}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o777, 0o702])
def test_a_directory_that_others_may_use_is_refused(tmp_path, mode):
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    with pytest.raises(ValueError, match="not ours alone"):
        PrefixStore(config_of(tmp_path), STATE)
    (tmp_path / "store").chmod(0o700)
    PrefixStore(config_of(tmp_path), STATE).close()


def test_a_link_and_a_relative_path_are_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "store").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="not ours alone"):
        PrefixStore(config_of(tmp_path), STATE)
    with pytest.raises(ValueError, match="not absolute"):
        config_of(tmp_path, directory=Path("store"))


@pytest.mark.parametrize("key", [b"", b"a" * 31, b"a" * 33, "../" * 10 + "aa", b"/etc/passwd"])
def test_only_keys_become_names(key):
    with pytest.raises(ValueError, match="no key"):
        key_folder(key)


def test_whatever_a_prompt_says_names_are_digits(tmp_path):
    store = PrefixStore(config_of(tmp_path), cut(fingerprint="../../etc"))
    world = full_world(cut(), 20)
    for tokens in (prompt(20), [-1] * 20, [2**31 - 1] * 20):
        assert write_all(store, store.chain(tokens), world, Span(0, 20))[0].why is None
    shape = re.compile(r"v1-[0-9a-f]{16}-[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{64}/l0-3\.h0-4\.t\d+\.p35\.x0")
    found = [str(path.relative_to(tmp_path / "store")) for path in record_files(tmp_path / "store")]
    assert len(found) == 6
    assert all(shape.fullmatch(name) for name in found)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_with_sync_a_record_and_its_folders_are_on_the_disk_first(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink().suffix))
    kept(tmp_path, num_tokens=16)
    assert synced == []
    kept(tmp_path, num_tokens=16, sync=True, tokens_per_record=8)
    assert [suffix == ".part" for suffix in synced] == [True, False, False, False] * 2
