"""What an agent's card carries besides kind and name.

In:  a transport's own bytes, and the random token of this run of the agent.
Out: the blob of the card, and back.
Law: transport bytes reach a transport only if they are exactly those that a peer's transport made.

Evidence for the digest: NIXL 1.5.1 dies of a segmentation fault on metadata with one byte changed (1 of 5 tries).
It guards against damage, not against malice; who may send cards at all is for the side channel's keys to say.
"""

import hashlib

import msgspec

from kv_core.errors import CallerError

TOKEN_BYTES = 16


class Blob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """One run of an agent, how to reach it, and a digest of both."""

    token: bytes
    transport: bytes
    digest: bytes


def pack_blob(token: bytes, transport: bytes) -> bytes:
    """The blob of a card."""
    return msgspec.msgpack.encode(Blob(token=token, transport=transport, digest=_digest(token, transport)))


def unpack_blob(packed: bytes) -> Blob:
    """The blob of a peer's card; raises CallerError if it is not one, or damaged."""
    try:
        blob = msgspec.msgpack.decode(packed, type=Blob)
    except msgspec.MsgspecError as error:
        raise CallerError(f"not the blob of an agent ({len(packed)} bytes): {error}") from error
    expected = _digest(blob.token, blob.transport)
    if blob.digest != expected:
        raise CallerError(f"a damaged blob: ours={expected.hex()}, theirs={blob.digest.hex()[:80]}")
    return blob


def _digest(token: bytes, transport: bytes) -> bytes:
    return hashlib.sha256(token + transport).digest()
