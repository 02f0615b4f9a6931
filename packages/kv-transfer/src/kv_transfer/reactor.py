"""The one thread in which a door lives.

In:  packets of the wire, timers that are due, callbacks posted by other threads.
Out: each of them handed to the resident, one at a time; so the resident's state needs no lock.
Law: whatever a packet, timer or callback raises is counted and logged, and the thread goes on. If the thread ends
     nevertheless, `failure` says why, and the resident was told.
"""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from kv_transfer.config import TransferConfig
from kv_transfer.faults import Faults, NoFaults
from kv_transfer.protocol import codec
from kv_transfer.protocol.errors import MalformedMessage, ProtocolError, UnexpectedMessage
from kv_transfer.protocol.messages import Message, RejectCode, Rejected, clipped
from kv_transfer.pulse import Pulse
from kv_transfer.status import Counters
from kv_transfer.threads import leave_pinned_core
from kv_transfer.timers import Clock, Timers
from kv_transfer.wire import Link, Packet, Route, ZmqWire

logger = logging.getLogger(__name__)

MAX_CALLS_A_TURN: Final = 1024


class Resident(Protocol):
    """Whoever lives in a reactor."""

    def from_door(self, route: Route, message: Message) -> None:
        """Somebody called. A ProtocolError is answered with Rejected."""

    def from_link(self, link: Link, message: Message) -> None:
        """A door that we call answered."""

    def bad_link(self, link: Link, error: ProtocolError) -> None:
        """A door that we call answered with something that is no message of ours."""

    def turn(self) -> None:
        """Everything that had come in is handled."""

    def ended(self) -> None:
        """The thread ends, well or badly: nothing will be handed in any more; the wire is still open."""


class Reactor:
    """A thread around a wire, timers and an inbox; made in the caller's thread, where listening may fail."""

    def __init__(
        self,
        name: str,
        config: TransferConfig,
        faults: Faults | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.timers = Timers(clock)
        self.counters = Counters()
        self._inbox: deque[Callable[[], None]] = deque()
        self._max_message_bytes = config.max_message_bytes
        self.wire = ZmqWire(config, self.timers, faults or NoFaults(), self.counters, self.post)
        self._waker = Waker()
        self.wire.watch(self._waker.descriptor)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._resident: Resident | None = None
        self._stopping = False
        self.failure: BaseException | None = None
        self.pulse = Pulse("reactor")

    def start(self, resident: Resident) -> None:
        """Begin to serve."""
        self._resident = resident
        self._thread.start()

    def post(self, run: Callable[[], None]) -> None:
        """Run a callback in the reactor's thread, in order of posting; from any thread, never blocks.

        After the thread has ended it is dropped.
        """
        self._inbox.append(run)
        self._waker.wake()

    def wake(self) -> None:
        """Let the resident have a turn; from any thread, never blocks."""
        self._waker.wake()

    def stop(self, timeout_s: float) -> bool:
        """End the thread and close the sockets; False if it did not end in time. Idempotent."""
        self.post(self.end)
        return self.join(timeout_s)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False if it did not in time."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def discard(self) -> None:
        """Close the sockets of a reactor that never started."""
        self.wire.close()
        self._waker.close()

    def end(self) -> None:
        """The thread ends after this turn; of the reactor's thread."""
        self._stopping = True

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        leave_pinned_core()
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            logger.critical("the reactor %s ends by an error of its own", self._thread.name, exc_info=True)
            self.failure = error
            self.pulse.ends(repr(error))
        finally:
            self.pulse.rests()
            assert self._resident is not None
            self._guarded(self._resident.ended)
            self.wire.close()
            self._waker.close()

    def _turn(self) -> None:
        assert self._resident is not None
        self.pulse.rests()
        packets = self.wire.wait(0.0 if self._inbox else self.timers.next_delay())
        self.pulse.begins("turn")
        for packet in packets:
            self._guarded(lambda packet=packet: self._deliver(packet))  # type: ignore[misc]
        self._waker.drain()
        for _ in range(min(len(self._inbox), MAX_CALLS_A_TURN)):
            self._guarded(self._inbox.popleft())
        self._guarded(self.timers.run_due)
        self._guarded(self._resident.turn)

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception:
            self.counters.add("internal_errors")
            logger.exception("an error of our own; going on")

    def _deliver(self, packet: Packet) -> None:
        assert self._resident is not None
        self.counters.add("messages_in")
        try:
            message = self._message(packet)
            if isinstance(packet.source, int):
                self._resident.from_link(Link(packet.source), message)
            else:
                self._resident.from_door(Route(packet.source), message)
        except ProtocolError as error:
            self.counters.add("bad_messages")
            logger.debug("refused a message: %s", error)
            if isinstance(packet.source, int):
                self._resident.bad_link(Link(packet.source), error)
            else:
                self._reject(Route(packet.source), error)

    def _message(self, packet: Packet) -> Message:
        if len(packet.frames) != 1:
            raise MalformedMessage(f"a message is one frame: got={len(packet.frames)}")
        return codec.decode(packet.frames[0], self._max_message_bytes)

    def _reject(self, route: Route, error: ProtocolError) -> None:
        # Why even to a foreign version: the header names ours, which is all that the other side needs to read.
        code = RejectCode.UNEXPECTED if isinstance(error, UnexpectedMessage) else RejectCode.MALFORMED
        self.wire.reply(route, Rejected(code=code, detail=clipped(str(error))))


class Waker:
    """Ends a wait of the reactor from another thread."""

    def __init__(self) -> None:
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)

    @property
    def descriptor(self) -> int:
        return self._ear.fileno()

    def wake(self) -> None:
        """Never blocks; a full pipe has been woken already, a closed one needs no waking."""
        try:
            self._mouth.send(b"!")
        except OSError:
            return

    def drain(self) -> None:
        """Forget all wake-ups so far."""
        try:
            while self._ear.recv(4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        self._ear.close()
        self._mouth.close()
