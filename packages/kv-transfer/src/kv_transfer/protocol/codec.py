"""Messages as bytes: two bytes of magic, the wire version, a msgpack map.

    offset  0     2          4
            "kf"  u16 (LE)   msgpack body, keys by field name, `type` names the message

In:  a message, or whatever bytes a socket gave.
Out: bytes, or a message.
Law: never pickle; `decode` returns a message or raises a ProtocolError, whatever it is fed, and looks at no body
     that is longer than `max_bytes` or of a foreign version.
"""

import struct
from typing import Final

import msgspec

from kv_core.errors import CallerError, CapacityError
from kv_transfer.protocol.errors import ForeignVersion, MalformedMessage
from kv_transfer.protocol.messages import Message

MAGIC: Final = b"kf"
WIRE_VERSION: Final = 5
"""Raised by every change of bytes; docs/wire.md keeps the history."""

MAX_MESSAGE_BYTES: Final = 4 << 20

_HEADER: Final = struct.Struct("<2sH")
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def encode(message: Message, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """The bytes of a message; CapacityError if no peer would take that many, CallerError if a value is out of range.

    So what we send is never malformed. Reading it back costs microseconds, once a chunk of megabytes.
    """
    try:
        body = _ENCODER.encode(message)
        _DECODER.decode(body)
    except (ValueError, OverflowError, TypeError) as error:
        raise CallerError(f"{type(message).__name__} would be refused by every peer: {error}") from error
    if len(body) + _HEADER.size > max_bytes:
        raise CapacityError(f"{type(message).__name__} is too long: got={len(body) + _HEADER.size}, most={max_bytes}")
    return _HEADER.pack(MAGIC, WIRE_VERSION) + body


def decode(packet: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> Message:
    """The message in `packet`; raises MalformedMessage or ForeignVersion."""
    if not _HEADER.size <= len(packet) <= max_bytes:
        raise MalformedMessage(f"length out of bounds: got={len(packet)}, allowed={_HEADER.size}..{max_bytes}")
    magic, version = _HEADER.unpack_from(packet)
    if magic != MAGIC:
        raise MalformedMessage(f"not a message of ours: ours={MAGIC!r}, theirs={magic!r}")
    if version != WIRE_VERSION:
        raise ForeignVersion(ours=WIRE_VERSION, theirs=version)
    try:
        return _DECODER.decode(memoryview(packet)[_HEADER.size :])
    # RecursionError: deep nesting. UnicodeDecodeError is a ValueError, as are msgspec's own.
    except (ValueError, RecursionError, OverflowError, TypeError) as error:
        raise MalformedMessage(f"not a valid message: {error}") from error
