"""Places where a test may make things go wrong.

Out: `Faults`, what the session layer asks at each such place; `NoFaults`, which answers "all is well".
Law: with NoFaults no byte and no message differs; a hook never runs in an engine's thread.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from kv_core.ids import SessionId
from kv_transfer.protocol.messages import Message

if TYPE_CHECKING:
    import torch

    from kv_transfer.plan.plan import Chunk

ON_TIME: Final = (0.0,)


class Faults(Protocol):
    """What may go wrong, and where."""

    def after_verify(self, session: SessionId, chunk: "Chunk", received: "torch.Tensor") -> None:
        """Copy thread: the received bytes (uint8, in staging) are verified and not yet scattered; may change them."""

    def before_write(self, session: SessionId, seq: int) -> bool:
        """Reactor: True holds the write of this chunk, which has passed all its checks; asked again every 10 ms.

        A held write goes out when this turns False, whatever has become of its session: a late writer.
        """

    def outgoing(self, message: Message) -> Sequence[float]:
        """Reactor: the delays in seconds after which copies of this message leave; none at all drops it."""


class NoFaults:
    """Nothing goes wrong."""

    def after_verify(self, session: SessionId, chunk: "Chunk", received: "torch.Tensor") -> None:
        """Leaves the bytes as they are."""

    def before_write(self, session: SessionId, seq: int) -> bool:  # noqa: ARG002
        """Holds nothing."""
        return False

    def outgoing(self, message: Message) -> Sequence[float]:  # noqa: ARG002
        """One copy, at once."""
        return ON_TIME
