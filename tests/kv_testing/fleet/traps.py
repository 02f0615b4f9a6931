"""What can go wrong inside one engine's process, at a step of the protocol or by chance.

In:  a Trap, to be sprung once at a named step; a Weather of control messages.
Out: `Traps`, the faults that the process's ranks and door share; what has happened, to be counted by the test.
Law: a trap springs in the thread that takes the step, before the message leaves or the bytes move. Corrupted packets
     are garbage to whoever reads them, never another message: TCP has checksums, and a peer that lies is another test.
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import torch

from kv_core.ids import SessionId
from kv_testing.messages import mutated
from kv_testing.sim.clockwork import is_same_message
from kv_transfer.plan.plan import Chunk
from kv_transfer.protocol import codec
from kv_transfer.protocol.messages import Message
from kv_transfer.wire import ZmqWire

Action = Literal["kill", "stop", "drop", "double", "late", "corrupt", "spoil", "abort", "close"]
"""`spoil` flips a bit of received bytes after they were verified; to `abort` all it has under way, or to `close` and
exit, is what the engine does at its next step."""

WRITE, SCATTER = "write", "scatter"
"""Steps that are no message: a chunk is gathered and about to be written; it has come, and is about to be scattered."""

LATE_S = 0.5
"""Longest delay by the weather."""


@dataclass(frozen=True)
class Trap:
    """What is to happen when the step is taken for the n-th time."""

    step: str
    """WRITE, SCATTER, or the type of the message that is about to leave."""
    action: Action
    nth: int = 1
    after_s: float = 0.0
    """For kill and stop: how long after the step, which is then taken. For late: how long the message is kept back."""


@dataclass(frozen=True)
class Weather:
    """How often each thing happens to a control message that leaves."""

    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0
    corrupt: float = 0.0


@dataclass
class Traps:
    """The faults of one process (`kv_transfer.faults.Faults`); of several threads."""

    seed: int
    trap: Trap | None = None
    weather: Weather = field(default_factory=Weather)
    holds_writes: bool = False
    due: Action | None = None
    """What the engine is to do at its next step."""
    counts: Counter[str] = field(default_factory=Counter)
    """What has happened, by action; and "held"."""

    def __post_init__(self) -> None:
        self._dice = Random(self.seed)
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()
        self._next_packet = threading.local()

    def set(self, trap: Trap | None) -> None:
        """Set this trap, in place of the last."""
        with self._lock:
            self.trap = trap
            self._taken.clear()
            self.counts["sprung"] = 0

    def after_verify(self, session: SessionId, chunk: Chunk, received: torch.Tensor) -> None:
        trap = self._spring(SCATTER)
        if trap is not None and trap.action == "spoil":
            received[0] ^= 1

    def before_write(self, session: SessionId, seq: int) -> bool:
        self._spring(WRITE)
        self.counts["held"] += self.holds_writes
        return self.holds_writes

    def outgoing(self, message: Message) -> Sequence[float]:
        trap = self._spring(type(message).__name__)
        action, late_s = (trap.action, trap.after_s) if trap else self._drawn()
        if action is not None:
            self.counts[action] += 1
        match action:
            case "drop":
                return ()
            case "double":
                return (0.0, 0.0)
            case "late":
                return (late_s,)
            case "corrupt":
                self._next_packet.is_corrupt = True
        return (0.0,)

    def corrupts(self, wire: ZmqWire) -> None:
        """Let this wire send garbage when it is time for it."""
        attempt = wire._attempt

        def tamper(send: Callable[[bytes], object], packet: bytes) -> None:
            if getattr(self._next_packet, "is_corrupt", False):
                self._next_packet.is_corrupt = False
                packet = self._garbage_of(packet)
            attempt(send, packet)

        wire._attempt = tamper  # type: ignore[method-assign]

    def _spring(self, step: str) -> Trap | None:
        """The trap, if this step springs it; signals are sent, what the engine is to do is noted."""
        with self._lock:
            trap = self.trap
            if trap is None or trap.step != step:
                return None
            self._taken[step] += 1
            if self._taken[step] < trap.nth:
                return None
            self.trap = None
        self.counts["sprung"] += 1
        match trap.action:
            case "kill":
                _signal(signal.SIGKILL, trap.after_s)
            case "stop":
                _signal(signal.SIGSTOP, trap.after_s)
            case "abort" | "close":
                self.due = trap.action
        return trap

    def _drawn(self) -> tuple[Action | None, float]:
        """What the weather does to one message, and how late it is then."""
        weather = self.weather
        chances: tuple[tuple[Action, float], ...] = (
            ("drop", weather.drop),
            ("double", weather.double),
            ("late", weather.late),
            ("corrupt", weather.corrupt),
        )
        with self._lock:
            action = next((action for action, chance in chances if chance and self._dice.random() < chance), None)
            return action, LATE_S * self._dice.random()

    def _garbage_of(self, packet: bytes) -> bytes:
        message = codec.decode(packet)
        with self._lock:
            while is_same_message(garbage := mutated(packet, self._dice), message) is not None:
                pass
        return garbage


def _signal(number: signal.Signals, after_s: float) -> None:
    """To this process, now or a little later."""
    if after_s:
        threading.Timer(after_s, os.kill, (os.getpid(), number)).start()
    else:
        os.kill(os.getpid(), number)
