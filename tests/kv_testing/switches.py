"""Faults that tests switch on and off while a world runs."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event

import torch

from kv_core.ids import SessionId
from kv_transfer.plan.plan import Chunk
from kv_transfer.protocol.messages import Message


@dataclass
class Switches:
    """Faults that a test sets while a world runs; names are those of message types."""

    dropped: set[str] = field(default_factory=set)
    doubled: bool = False
    delay_s: Callable[[], float] | None = None
    holds_writes: bool = False
    corrupts: Callable[[Chunk, torch.Tensor], None] | None = None
    num_said: Counter[str] = field(default_factory=Counter)
    num_held: int = 0

    def after_verify(self, session: SessionId, chunk: Chunk, received: torch.Tensor) -> None:
        if self.corrupts is not None:
            self.corrupts(chunk, received)

    def before_write(self, session: SessionId, seq: int) -> bool:
        self.num_held += self.holds_writes
        return self.holds_writes

    def outgoing(self, message: Message) -> Sequence[float]:
        name = type(message).__name__
        self.num_said[name] += 1
        if name in self.dropped:
            return ()
        delay_s = 0.0 if self.delay_s is None else self.delay_s()
        return (delay_s, delay_s) if self.doubled else (delay_s,)


def hang_until(event: Event) -> None:
    """Keeps a reactor busy, as if its process were stopped."""
    event.wait(60)
