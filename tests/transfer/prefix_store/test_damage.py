"""Whatever happens to a file is a counted miss: no exception, no wrong bytes, and the same read works without it."""

import errno
import os
import shutil

import pytest

from kv_core.spans import Span
from kv_testing.stores import config_of, cut, full_world, misses, num_wrong, prompt, read_all, record_files, write_all
from kv_testing.tagged import make_world
from kv_transfer.file_mover import FileCalls, PlainFiles
from kv_transfer.prefix_store.header import HEADER_BYTES
from kv_transfer.prefix_store.names import key_folder
from kv_transfer.prefix_store.store import PrefixStore

STATE = cut()
WHOLE = Span(0, 48)


@pytest.fixture
def kept(tmp_path):
    """A directory with three records of one prompt."""
    store = PrefixStore(config_of(tmp_path), STATE)
    write_all(store, store.chain(prompt(48)), full_world(STATE, 48), WHOLE)
    store.close()
    return tmp_path


def second_of(directory):
    store = PrefixStore(config_of(directory), STATE)
    key = store.chain(prompt(48)).key(1, 16)
    store.close()
    (found,) = (next((directory / "store").glob("v1-*")) / key_folder(key)).iterdir()
    return found


def truncated(path):
    os.truncate(path, path.stat().st_size - 1)


def cut_within_the_header(path):
    os.truncate(path, HEADER_BYTES - 1)


def emptied(path):
    os.truncate(path, 0)


def longer(path):
    path.write_bytes(path.read_bytes() + b"\0")


def flipped(at):
    def flip(path):
        content = bytearray(path.read_bytes())
        content[at] ^= 16
        path.write_bytes(content)

    return flip


def replaced_by_another_record(path):
    """As if a directory had been mixed up: a whole and sound file, of other tokens."""
    other = next(found for found in record_files(path.parents[3]) if found.parent != path.parent)
    shutil.copyfile(other, path)


def replaced_by_a_directory(path):
    path.unlink()
    path.mkdir()


def replaced_by_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def replaced_by_a_link(path):
    target = path.parents[3] / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


DAMAGES = {
    "truncated": (truncated, {"truncated": 1}),
    "cut within the header": (cut_within_the_header, {"truncated": 1}),
    "emptied": (emptied, {"truncated": 1}),
    "longer": (longer, {"truncated": 1}),
    "first bit of the payload": (flipped(HEADER_BYTES), {"corrupt": 1}),
    "last bit of the payload": (flipped(-1), {"corrupt": 1}),
    "magic": (flipped(0), {"corrupt": 1}),
    "key": (flipped(80), {"corrupt": 1}),
    "checksum": (flipped(168), {"corrupt": 1}),
    "unused bytes": (flipped(200), {"corrupt": 1}),
    "of other tokens": (replaced_by_another_record, {"other_content": 1}),
    "deleted": (os.unlink, {"absent": 1}),
    "a directory": (replaced_by_a_directory, {"unreadable": 1}),
    "a pipe": (replaced_by_a_pipe, {"unreadable": 1}),
    "a link": (replaced_by_a_link, {"unreadable": 1}),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("when", ["before the start", "behind the index"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_a_counted_miss_and_nothing_of_the_record_is_filled(kept, damage, when):
    harm, wanted = DAMAGES[damage]
    path = second_of(kept)
    if when == "before the start":
        harm(path)
    store = PrefixStore(config_of(kept), STATE)
    if when == "behind the index":
        harm(path)
    chain, target = store.chain(prompt(48)), make_world(STATE, 48, "CBTHD", 2)
    assert read_all(store, chain, target, WHOLE) == {16}
    assert misses(store, "read") == wanted
    assert num_wrong(target, Span(0, 16)) == 0, "the record before is right, behind it nothing was filled"


def test_without_damage_the_same_read_misses_nothing(kept):
    store, target = PrefixStore(config_of(kept), STATE), make_world(STATE, 48, "CBTHD", 2)
    assert read_all(store, store.chain(prompt(48)), target, WHOLE) == {48}
    assert misses(store, "read") == {}
    assert num_wrong(target, WHOLE) == 0


@pytest.mark.parametrize("harm", [truncated, flipped(HEADER_BYTES), replaced_by_another_record])
def test_a_damaged_file_is_removed_and_written_again(kept, harm):
    harm(second_of(kept))
    store, target = PrefixStore(config_of(kept), STATE), make_world(STATE, 48, "CBTHD", 2)
    chain = store.chain(prompt(48))
    assert read_all(store, chain, target, WHOLE) == {16}
    assert store.lookup(chain) == 16
    (outcome,) = write_all(store, chain, full_world(STATE, 48), WHOLE)
    assert outcome.num_bytes == second_of(kept).stat().st_size
    assert read_all(store, chain, target, WHOLE) == {48}
    assert num_wrong(target, WHOLE) == 0


def test_where_one_file_fails_others_that_hold_the_same_are_read(kept):
    halves = cut(2)
    whole = second_of(kept)
    aside = whole.rename(kept / "aside")
    store = PrefixStore(config_of(kept), halves)
    chain = store.chain(prompt(48))
    write_all(store, chain, full_world(halves, 48), WHOLE)
    aside.rename(whole)
    flipped(-1)(whole)
    again, target = PrefixStore(config_of(kept), STATE), make_world(STATE, 48, "CBTHD", 2)
    assert read_all(again, chain, target, WHOLE) == {48}
    assert misses(again, "read") == {"corrupt": 1}
    assert num_wrong(target, WHOLE) == 0


def failing(number):
    def call(file, buffer):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.EIO, "unreadable"),
        (errno.EACCES, "not_permitted"),
        (errno.EPERM, "not_permitted"),
        (errno.ESTALE, "unreadable"),
    ],
)
def test_a_disk_that_does_not_read(kept, number, why):
    mover = PlainFiles(FileCalls(read_into=failing(number)))
    store, target = PrefixStore(config_of(kept), STATE, mover=mover), make_world(STATE, 48, "CBTHD", 2)
    assert read_all(store, store.chain(prompt(48)), target, WHOLE) == {0}
    assert misses(store, "read") == {why: 1}
    assert num_wrong(target, Span(0, 0)) == 0
    assert len(record_files(kept / "store")) == 3, "it may read again later"


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.ENOSPC, "disk_full"),
        (errno.EDQUOT, "disk_full"),
        (errno.EIO, "unreadable"),
        (errno.EROFS, "not_permitted"),
    ],
)
@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_a_disk_that_does_not_write_leaves_nothing_half(tmp_path, number, why, num_before):
    """It fails at the first bytes, between header and payload, or in the second record."""
    calls = []

    def write(file, buffer):
        calls.append(len(buffer))
        return os.write(file, buffer) if len(calls) <= num_before else failing(number)(file, buffer)

    store = PrefixStore(config_of(tmp_path), STATE, mover=PlainFiles(FileCalls(write=write)))
    chain, world = store.chain(prompt(48)), full_world(STATE, 48)
    (outcome,) = write_all(store, chain, world, WHOLE)
    num_whole = num_before // 2
    assert (outcome.num_tokens, outcome.why) == (16 * num_whole, why)
    assert misses(store, "write") == {why: 1}
    assert len(record_files(tmp_path / "store")) == num_whole
    assert list((tmp_path / "store").glob("*/*.part")) == []
    assert store.lookup(chain) == 16 * num_whole
    again = PrefixStore(config_of(tmp_path), STATE)
    assert [outcome.why for outcome in write_all(again, chain, world, WHOLE)] == [None]
    assert again.lookup(chain) == 48


def test_short_writes_and_reads_move_everything_in_the_end(tmp_path):
    calls = FileCalls(
        lambda file, buffer: os.write(file, buffer[:100]), lambda file, buffer: os.readv(file, [buffer[:77]])
    )
    store = PrefixStore(config_of(tmp_path), STATE, mover=PlainFiles(calls))
    chain, target = store.chain(prompt(48)), make_world(STATE, 48, "CBTHD", 2)
    write_all(store, chain, full_world(STATE, 48), WHOLE)
    assert read_all(store, chain, target, WHOLE) == {48}
    assert num_wrong(target, WHOLE) == 0


def test_a_directory_that_vanishes_is_a_miss_of_every_call(kept):
    store = PrefixStore(config_of(kept), STATE)
    shutil.rmtree(kept / "store")
    chain, world = store.chain(prompt(48)), full_world(STATE, 48)
    assert read_all(store, chain, world, WHOLE) == {0}
    assert [outcome.why for outcome in write_all(store, chain, world, WHOLE)] == ["absent"]
    store.close()
    assert store.lookup(chain) == 0
    assert misses(store, "lookup") == {"closed": 1}
    assert [outcome.why for outcome in write_all(store, chain, world, WHOLE)] == ["closed"]


def test_a_directory_that_cannot_be_made_is_a_store_that_holds_nothing(tmp_path):
    (tmp_path / "file").touch()
    store = PrefixStore(config_of(tmp_path, directory=tmp_path / "file" / "store"), STATE)
    chain, world = store.chain(prompt(48)), full_world(STATE, 48)
    assert store.lookup(chain) == 0
    assert read_all(store, chain, world, WHOLE) == {0}
    assert [outcome.why for outcome in write_all(store, chain, world, WHOLE)] == ["unreadable"]
    assert store.counts["open unreadable"] == 1
    store.close()


@pytest.mark.parametrize(("name", "num_read", "why"), [("h0-99", 16, {"truncated": 1}), ("h1-5", 16, {"absent": 1})])
def test_a_name_is_not_believed(kept, name, num_read, why):
    """A sound file under the name of heads that it does not have."""
    path = second_of(kept)
    path.rename(path.with_name(path.name.replace("h0-4", name)))
    store, target = PrefixStore(config_of(kept), STATE), make_world(STATE, 48, "CBTHD", 2)
    assert read_all(store, store.chain(prompt(48)), target, WHOLE) == {num_read}
    assert misses(store, "read") == why
    assert num_wrong(target, Span(0, 16)) == 0


def test_heads_of_the_same_number_are_not_taken_for_each_other(tmp_path):
    state = cut(2)
    store = PrefixStore(config_of(tmp_path), state)
    chain = store.chain(prompt(16))
    write_all(store, chain, full_world(state, 16), Span(0, 16))
    first, second = record_files(tmp_path / "store")
    shutil.copyfile(first, second)
    target = make_world(state, 16, "CBTHD", 2)
    assert read_all(store, chain, target, Span(0, 16)) == {16, 0}
    assert misses(store, "read") == {"other_content": 1}


def test_a_file_where_a_folder_should_be_is_one_miss(kept):
    folder = second_of(kept).parent
    shutil.rmtree(folder)
    folder.touch()
    store, target = PrefixStore(config_of(kept), STATE), make_world(STATE, 48, "CBTHD", 2)
    chain = store.chain(prompt(48))
    assert store.lookup(chain) == 16
    assert read_all(store, chain, target, WHOLE) == {16}
    assert set(misses(store, "read")) == {"unreadable"}
    (outcome,) = write_all(store, chain, full_world(STATE, 48), WHOLE)
    assert (outcome.num_tokens, outcome.why) == (16, "unreadable")


def whole(directory):
    return directory / "store"


def namespaces(directory):
    return next((directory / "store").glob("v1-*"))


def own_of_the_process(directory):
    return next((directory / "store").glob("kv-blocks-*"))


@pytest.mark.parametrize("which", [whole, namespaces, own_of_the_process])
def test_a_directory_that_is_removed_under_a_store_is_made_again(tmp_path, which):
    """As cleaners of old files do. One write finds it gone; what comes after it is kept, and found."""
    store, world = PrefixStore(config_of(tmp_path), STATE), full_world(STATE, 48)
    write_all(store, store.chain(prompt(48)), world, WHOLE)
    shutil.rmtree(which(tmp_path))
    (lost,) = write_all(store, store.chain(prompt(16, first=100)), world, Span(0, 16))
    assert (lost.num_tokens, store.counts["write absent"], store.counts["restored"]) == (0, 1, 1)

    later = store.chain(prompt(48, first=200))
    (kept,) = write_all(store, later, world, WHOLE)
    assert (kept.num_tokens, store.lookup(later)) == (48, 48)
    again = make_world(STATE, 48, "CBTHD", 1)
    assert read_all(store, later, again, WHOLE) == {48}
    assert num_wrong(again, WHOLE) == 0
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    store.close()
    assert not list((tmp_path / "store").glob("kv-blocks-*"))


def test_a_directory_that_others_have_made_their_own_meanwhile_is_left_alone(tmp_path):
    store, world = PrefixStore(config_of(tmp_path), STATE), full_world(STATE, 48)
    write_all(store, store.chain(prompt(48)), world, WHOLE)
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").mkdir(mode=0o755)
    for first in (100, 200):
        (lost,) = write_all(store, store.chain(prompt(16, first=first)), world, Span(0, 16))
        assert lost.num_tokens == 0
    assert "restored" not in store.counts
    assert [path.name for path in (tmp_path / "store").iterdir()] in (
        [],
        ["lock"],
        ["usage", "lock"],
        ["lock", "usage"],
    )
    store.close()
