"""What a rank offers, told in memory that the readers of its caches see: where the blocks lie, and whether it stands.

In:  offers that are complete, filled and served; the end of each.
Out: Book, for the one thread that writes it; BookReader, for a process that maps it.
Law: an entry is there only while its offer takes readers, and is gone before the engine hears that the blocks are free.
     So who finds an entry, reads the blocks, and then finds it standing has read what was offered, whatever has become
     of its owner meanwhile. An entry that cannot be read whole is none.

A cell:  generation u64 (0: free) | key 16 bytes | CRC of what follows u32 | its length u32 | msgpack of Entry
The key is a digest of transfer id and prompt key: who only sees the memory cannot guess what to ask for.
"""

import struct
from collections.abc import Iterator
from hashlib import blake2b
from itertools import count
from typing import Annotated, Final, NamedTuple
from zlib import crc32

import msgspec

from kv_core.ids import RequestId, TransferId
from kv_transfer.orders import BlockTables, Tables

CELL_BYTES: Final = 16 << 10
"""Room for the tables of about 80,000 tokens in blocks of 16; of what does not fit peers ask."""
NUM_CELLS: Final = 1024
PROBES: Final = 8
"""How many cells a key may be in."""

_GENERATION: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<16sII")
_BODY_AT: Final = _GENERATION.size + _HEAD.size

Pair = tuple[TransferId, bytes]


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a cell holds."""

    num_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    by_group: Annotated[
        tuple[tuple[Annotated[int, msgspec.Meta(ge=-1, lt=1 << 40)], ...], ...], msgspec.Meta(min_length=1)
    ]


_DECODER: Final = msgspec.msgpack.Decoder(_Body)


class Entry(NamedTuple):
    """One offer as a reader finds it; `at` and `generation` say where, and which."""

    at: int
    generation: int
    num_tokens: int
    by_group: Tables


class Book:
    """The writing end, of one thread. `memory` is zeroes, a multiple of `cell_bytes` long."""

    def __init__(self, memory: memoryview, cell_bytes: int = CELL_BYTES) -> None:
        self._memory: memoryview | None = memory
        self._cell_bytes = cell_bytes
        self._generations = count(1)
        self._cells: dict[RequestId, int] = {}

    def __len__(self) -> int:
        """Entries that stand."""
        return len(self._cells)

    def publish(self, request_id: RequestId, pair: Pair, tables: BlockTables) -> bool:
        """False, and nothing told, if there is no room for it, or we are closed."""
        body = msgspec.msgpack.encode((tables.num_tokens, tables.by_group))
        if self._memory is None or _BODY_AT + len(body) > self._cell_bytes or request_id in self._cells:
            return False
        key = _key_of(pair)
        for at in _places(key, len(self._memory), self._cell_bytes):
            if not _generation(self._memory, at):
                _HEAD.pack_into(self._memory, at + _GENERATION.size, key, crc32(body), len(body))
                self._memory[at + _BODY_AT : at + _BODY_AT + len(body)] = body
                # Last: from here on it is found.
                _GENERATION.pack_into(self._memory, at, next(self._generations))
                self._cells[request_id] = at
                return True
        return False

    def withdraw(self, request_id: RequestId) -> None:
        """From here on it does not stand; nothing if it never did."""
        at = self._cells.pop(request_id, None)
        if at is not None and self._memory is not None:
            _GENERATION.pack_into(self._memory, at, 0)

    def close(self) -> None:
        """Nothing stands any more, nor ever will. Idempotent."""
        for request_id in list(self._cells):
            self.withdraw(request_id)
        self._memory = None


class BookReader:
    """The reading end; of any thread."""

    def __init__(self, memory: memoryview, cell_bytes: int = CELL_BYTES) -> None:
        self._memory = memory
        self._cell_bytes = cell_bytes

    def find(self, pair: Pair) -> Entry | None:
        """The offer of this pair, if it is told here and stands."""
        key = _key_of(pair)
        for at in _places(key, len(self._memory), self._cell_bytes):
            generation = _generation(self._memory, at)
            known, crc, length = _HEAD.unpack_from(self._memory, at + _GENERATION.size)
            if not generation or known != key or _BODY_AT + length > self._cell_bytes:
                continue
            body = bytes(self._memory[at + _BODY_AT : at + _BODY_AT + length])
            if crc32(body) != crc or _generation(self._memory, at) != generation:
                return None
            try:
                found = _DECODER.decode(body)
            except msgspec.DecodeError:
                return None
            return Entry(at, generation, found.num_tokens, found.by_group)
        return None

    def stands(self, entry: Entry) -> bool:
        """Whether it has stood from when it was found until now."""
        return _generation(self._memory, entry.at) == entry.generation


def _generation(memory: memoryview, at: int) -> int:
    (found,) = _GENERATION.unpack_from(memory, at)
    return int(found)


def _key_of(pair: Pair) -> bytes:
    transfer_id, prompt_key = pair
    return blake2b(transfer_id.encode() + b"/" + prompt_key, digest_size=16).digest()


def _places(key: bytes, num_bytes: int, cell_bytes: int) -> Iterator[int]:
    """Where an entry of this key may begin."""
    num_cells, first = num_bytes // cell_bytes, int.from_bytes(key[:8], "little")
    return ((first + probe) % num_cells * cell_bytes for probe in range(min(PROBES, num_cells)))
