"""The first 256 bytes of a record's file: what the bytes behind them are.

In:  a Header, or what was read.
Out: 256 bytes, or the Header; Missed if they are none.
Law: every field is compared with what the reader wants before a byte of the payload is believed. Little-endian.

    offset  0  magic "KVPREFIX"        8  format version, u32       12  header bytes, u32 (256)
           16  hash rule, 32 bytes    48  model, 32 bytes           80  key, 32 bytes
          112  layers, 2 u32         120  heads, 2 u32             128  tokens, planes, head size, 3 u32
          140  element type, 20 bytes, filled up with zeroes       160  payload bytes, u64
          168  payload checksum, i64 (kv_transfer.checksum)        176  zeroes
          252  CRC-32 of the 252 bytes before, u32                 256  payload [layer][plane][token][head][element]
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Final

from kv_core.keys import BlockKey
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.plan.elements import ITEM_BYTES
from kv_transfer.prefix_store.boxes import Box
from kv_transfer.prefix_store.misses import Miss, Missed
from kv_transfer.prefix_store.names import FORMAT_VERSION, Namespace

HEADER_BYTES: Final = 256
MAGIC: Final = b"KVPREFIX"
_FIELDS: Final = struct.Struct("<8sII32s32s32s7I20sQq")
_CRC: Final = struct.Struct("<I")
_CRC_AT: Final = HEADER_BYTES - _CRC.size


@dataclass(frozen=True, slots=True)
class Header:
    """One record's file. The elements of the payload are those of the cache that wrote it."""

    namespace: Namespace
    key: BlockKey
    box: Box
    num_tokens: int
    num_planes: int
    head_size: int
    dtype: str
    checksum: int = 0

    @classmethod
    def of(cls, namespace: Namespace, key: BlockKey, box: Box, num_tokens: int, state: CacheState) -> "Header":
        """Of a payload whose checksum is not known yet."""
        return cls(namespace, key, box, num_tokens, state.num_planes, state.head_size, state.dtype)

    @property
    def payload_bytes(self) -> int:
        rows = len(self.box.layers) * self.num_planes * self.num_tokens * len(self.box.heads)
        return rows * self.head_size * ITEM_BYTES[self.dtype]

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes

    def packed(self) -> bytes:
        """The 256 bytes."""
        layers, heads = self.box.layers, self.box.heads
        fields = _FIELDS.pack(
            *(MAGIC, FORMAT_VERSION, HEADER_BYTES, self.namespace.rule, self.namespace.model, self.key),
            *(layers.start, layers.stop, heads.start, heads.stop, self.num_tokens, self.num_planes, self.head_size),
            *(self.dtype.encode(), self.payload_bytes, self.checksum),
        ).ljust(_CRC_AT, b"\0")
        return fields + _CRC.pack(zlib.crc32(fields))


def checksum_in(packed: bytes, wanted: Header) -> int:
    """The payload's checksum, if these are the bytes of `wanted` but for that; Missed tells what they are instead."""
    if len(packed) < HEADER_BYTES:
        raise Missed(Miss.TRUNCATED)
    fields = _FIELDS.unpack_from(packed)
    if packed[_CRC_AT:] != _CRC.pack(zlib.crc32(packed[:_CRC_AT])) or fields[0] != MAGIC:
        raise Missed(Miss.CORRUPT)
    if fields[1:3] != (FORMAT_VERSION, HEADER_BYTES):
        raise Missed(Miss.OTHER_FORMAT)
    if fields[3] != wanted.namespace.rule:
        raise Missed(Miss.OTHER_HASH_RULE)
    if fields[4] != wanted.namespace.model:
        raise Missed(Miss.OTHER_MODEL)
    if fields[:-1] != _FIELDS.unpack_from(wanted.packed())[:-1]:
        raise Missed(Miss.OTHER_CONTENT)
    checksum = fields[-1]
    assert isinstance(checksum, int), "law: the last field is a number"
    return checksum
