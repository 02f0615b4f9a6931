"""The book of offers that readers see: what is found is whole and stands, and what was withdrawn does not."""

import os
import signal
import struct
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.ids import RequestId, TransferId
from kv_transfer.direct.base import CannotMap
from kv_transfer.direct.book import Book, BookReader
from kv_transfer.direct.pages import MappedPages, SharedPages
from kv_transfer.orders import BlockTables

CELL, NUM_CELLS = 256, 4
TABLES = BlockTables(40, ((5, 3, -1), (7, 8, 9)))
PAIR = TransferId("ab" * 16), b"k" * 32


def ends(num_cells=NUM_CELLS):
    memory = memoryview(bytearray(num_cells * CELL))
    return Book(memory, CELL), BookReader(memory.toreadonly(), CELL), memory


def test_what_is_told_is_found_until_it_is_withdrawn():
    book, reader, _ = ends()
    assert reader.find(PAIR) is None
    assert book.publish(RequestId("r"), PAIR, TABLES)
    entry = reader.find(PAIR)
    assert (entry.num_tokens, entry.by_group) == (40, TABLES.by_group)
    assert reader.find((PAIR[0], b"x" * 32)) is None
    assert reader.stands(entry)
    book.withdraw(RequestId("r"))
    assert not reader.stands(entry)
    assert reader.find(PAIR) is None
    book.withdraw(RequestId("r"))


def test_the_same_told_again_is_another_entry():
    """Its blocks may have been somebody else's in between."""
    book, reader, _ = ends(num_cells=1)
    book.publish(RequestId("r"), PAIR, TABLES)
    before = reader.find(PAIR)
    book.withdraw(RequestId("r"))
    book.publish(RequestId("r"), PAIR, TABLES)
    again = reader.find(PAIR)
    assert again[2:] == before[2:]
    assert (reader.stands(before), reader.stands(again)) == (False, True)


def test_what_has_no_room_is_not_told():
    book, reader, _ = ends()
    long = BlockTables(4000, (tuple(range(1000)),))
    assert not book.publish(RequestId("long"), PAIR, long)
    names = [RequestId(f"r{number}") for number in range(NUM_CELLS + 1)]
    told = [book.publish(name, (TransferId(f"{number:032x}"), b"k"), TABLES) for number, name in enumerate(names)]
    assert told == [True] * NUM_CELLS + [False]
    assert len(book) == NUM_CELLS
    book.withdraw(names[0])
    assert book.publish(names[-1], PAIR, TABLES)
    assert reader.find(PAIR) is not None


def test_a_closed_book_tells_nothing():
    book, reader, _ = ends()
    book.publish(RequestId("r"), PAIR, TABLES)
    entry = reader.find(PAIR)
    book.close()
    assert not reader.stands(entry)
    assert not book.publish(RequestId("s"), PAIR, TABLES)
    book.withdraw(RequestId("s"))
    book.close()


@given(st.data())
def test_a_damaged_cell_is_no_entry_or_the_right_one(data):
    """Half written, or by a writer that we do not understand: whatever lies there, nothing else is believed."""
    book, reader, memory = ends(num_cells=1)
    book.publish(RequestId("r"), PAIR, TABLES)
    at = data.draw(st.integers(8, CELL - 1))
    memory[at] ^= data.draw(st.integers(1, 255))
    found = reader.find(PAIR)
    assert found is None or found[2:] == (40, TABLES.by_group)


def test_a_length_beyond_the_cell_is_no_entry():
    book, reader, memory = ends()
    book.publish(RequestId("r"), PAIR, TABLES)
    (at,) = (at for at in range(0, len(memory), CELL) if memory[at])
    struct.pack_into("<I", memory, at + 28, 1 << 31)
    assert reader.find(PAIR) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60))
def test_as_a_dictionary_would(steps):
    book, reader, _ = ends(num_cells=8)
    told, found = {}, []
    for number, comes in steps:
        name, pair = RequestId(f"r{number}"), (TransferId(f"{number:032x}"), b"key")
        if comes and book.publish(name, pair, replace(TABLES, num_tokens=number + 1)):
            assert number not in told
            told[number] = reader.find(pair)
            found.append(told[number])
        elif not comes:
            book.withdraw(name)
            told.pop(number, None)
        for other in range(10):
            entry = reader.find((TransferId(f"{other:032x}"), b"key"))
            assert entry == told.get(other)
            assert entry is None or entry.num_tokens == other + 1
    assert [entry for entry in found if reader.stands(entry)] == [entry for entry in found if entry in told.values()]


OWNER = """
import signal, sys
from kv_core.ids import RequestId, TransferId
from kv_transfer.direct.book import CELL_BYTES, Book
from kv_transfer.direct.pages import SharedPages
from kv_transfer.orders import BlockTables
pages = SharedPages(4 * CELL_BYTES)
Book(pages.memory).publish(RequestId("r"), (TransferId("ab" * 16), b"k" * 32), BlockTables(40, ((5, 3, 2),)))
print(pages.card.pid, pages.card.descriptor, pages.card.token.hex(), pages.card.num_bytes, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner():
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid, descriptor, token, num_bytes = process.stdout.readline().split()
    card = SharedPages(64).card
    card = type(card)(pid=int(pid), descriptor=int(descriptor), token=bytes.fromhex(token), num_bytes=int(num_bytes))
    yield process, card
    process.kill()
    process.communicate()


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_another_process_is_read_also_when_it_is_stopped_or_dead(owner, end):
    """What it has told stands: nobody can use its blocks for something else any more, or for now."""
    process, card = owner
    pages = MappedPages(card)
    reader = BookReader(pages.memory)
    entry = reader.find(PAIR)
    assert entry.by_group == ((5, 3, 2),)
    os.kill(process.pid, end)
    if end == signal.SIGKILL:
        process.wait(10)
    assert reader.find(PAIR) == entry
    assert reader.stands(entry)
    with pytest.raises(TypeError, match="read-only"):
        pages.memory[0] = 1
    del reader
    pages.close()
    pages.close()


def test_pages_that_are_not_those_are_refused(owner):
    process, card = owner
    kind = type(card)
    ours = SharedPages(card.num_bytes)
    others = {
        "not the one that told": kind(pid=os.getpid(), descriptor=ours.card.descriptor, token=card.token, num_bytes=64),
        "cannot be mapped": kind(pid=card.pid, descriptor=card.descriptor, token=card.token, num_bytes=1 << 30),
        "cannot be opened": kind(pid=card.pid, descriptor=999, token=card.token, num_bytes=64),
    }
    for why, other in others.items():
        with pytest.raises(CannotMap, match=why):
            MappedPages(other)
    process.kill()
    process.wait(10)
    with pytest.raises(CannotMap, match="cannot be opened"):
        MappedPages(card)
    ours.close()
    ours.close()
    with pytest.raises(CannotMap, match="cannot be opened"):
        MappedPages(ours.card)
