"""What a transport must do for the agent that drives it.

In:  one call at a time, all from the agent's own thread.
Out: posts that move, and their ends.
Law: `poll` tells physical facts: after True or TransportError this transport moves no byte of that post. It never
     waits for a peer; `post` may take as long as moving its bounded bytes takes.
"""

from typing import Protocol, TypeVar

from kv_core.errors import FerryError
from kv_transfer.agent.pieces import Piece
from kv_transfer.regions import Region

PostT = TypeVar("PostT")


class TransportError(FerryError):
    """A post ended badly, or the transport refused; the message is the reason that a completion carries."""


class Transport(Protocol[PostT]):
    """Moves one piece at a time, asynchronously. Every failure is a TransportError, and leaves things as they were."""

    @property
    def kind(self) -> str:
        """The kind of its agents' cards."""

    @property
    def memory_host(self) -> str:
        """As `Agent.memory_host`."""

    def open(self, name: str) -> None:
        """Starts under this name; the first call."""

    def register(self, region: Region) -> None:
        """Makes a region reachable, for posts of ours and of peers."""

    def deregister(self, region: Region) -> None:
        """Takes that back."""

    def blob(self) -> bytes:
        """What `add_peer` of a peer needs; covers the regions registered now."""

    def add_peer(self, name: str, blob: bytes) -> None:
        """Makes a peer reachable, or learns the regions that a known one has added."""

    def remove_peer(self, name: str) -> None:
        """Forgets a peer; all posts to it were released before."""

    def post(self, peer: str, piece: Piece) -> PostT:
        """Starts moving a piece. When it fails, nothing of the piece is moving."""

    def poll(self, post: PostT) -> bool:
        """Whether it is done; False while it moves. TransportError: it ended without being done."""

    def release(self, post: PostT) -> None:
        """Frees what a post holds; after its end, or when its peer is dead, or at the very end. Never fails."""

    def close(self) -> None:
        """Ends; the last call. All posts were released before."""
