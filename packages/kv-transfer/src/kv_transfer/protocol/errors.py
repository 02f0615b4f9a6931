"""What may be wrong with a message, or with the order of messages.

    ProtocolError (a PeerError)
    +-- MalformedMessage     the bytes are not a message of ours
    +-- ForeignVersion       a message of ours, of another wire version; names both
    +-- UnexpectedMessage    a message that nobody may send here or now

Law: whatever bytes arrive, `codec.decode` returns a message or raises one of these.
"""

from kv_core.errors import PeerError


class ProtocolError(PeerError):
    """The other side broke the protocol."""


class MalformedMessage(ProtocolError):
    """The bytes are not a message of ours."""


class ForeignVersion(ProtocolError):
    """The message is of another wire version."""

    def __init__(self, *, ours: int, theirs: int) -> None:
        super().__init__(f"wire versions differ: ours={ours}, theirs={theirs}")
        self.ours = ours
        self.theirs = theirs


class UnexpectedMessage(ProtocolError):
    """The message is well formed, but nobody may send it here or now."""
