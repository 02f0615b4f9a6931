"""The control plane's sockets: one door that everybody may call, and a link to each door we call.

In:  messages to send; addresses to call or to probe.
Out: packets that came in, each with where it came from.
Law: of one thread but for `probe`'s answer; no call blocks. Losing a message is legal everywhere: whoever needs an
     answer asks again. The wire knows bytes and addresses, never what a message means.

A link carries a random name that only the called door learns; a connection that is made anew keeps that name, so the
door's answers still find us (ROUTER hand-over).
"""

import ipaddress
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NewType, Protocol

import zmq

from kv_core.errors import FerryError
from kv_transfer.config import TransferConfig
from kv_transfer.faults import Faults
from kv_transfer.keys import guard, load_keys, lock
from kv_transfer.protocol import codec
from kv_transfer.protocol.messages import Message
from kv_transfer.status import Counters
from kv_transfer.timers import Timers

Route = NewType("Route", bytes)
"""Who called at our door; answers go there."""

Link = NewType("Link", int)
"""A door that we call."""

Probe = Literal["refused", "open", "silent"]
"""What came of calling an address: nobody listens there, somebody does, or no answer in time."""

LINGER_MS: Final = 200
RECONNECT_MS: Final = 100
RECONNECT_LIMIT_MS: Final = 2000
PROBE_TIMEOUT_S: Final = 1.0
MAX_PACKETS_A_TURN: Final = 64
MAX_QUEUED: Final = 16_384
"""Messages that one connection may hold in each direction; more are lost, and said again by whoever needs them."""


class CannotListen(FerryError):
    """Our own address cannot be listened at; names host, port and the settings."""


class UnusableAddress(FerryError):
    """A peer's address cannot be called, ever."""


class Wire(Protocol):
    """What the session layer needs of a control plane."""

    def reply(self, route: Route, message: Message) -> None:
        """Answer whoever called."""

    def call(self, host: str, port: int) -> Link:
        """A link to a door, usable at once; connecting goes on behind it. Raises UnusableAddress.

        `host` is a numeric address, or "localhost": looking a name up would keep every message of ours waiting, since
        ZMQ does it in the one thread that moves them, again at each new connection.
        """

    def send(self, link: Link, message: Message) -> None:
        """Say something to a door we call."""

    def hang_up(self, link: Link) -> None:
        """Forget a link; idempotent."""

    def probe(self, host: str, port: int, then: Callable[[Probe], None]) -> None:
        """Find out whether anybody listens there; `then` runs later, in the wire's thread."""


@dataclass(frozen=True, slots=True)
class Packet:
    """Frames as they came in: from a caller at our door (Route), or from a door we call (Link)."""

    source: bytes | int
    frames: list[bytes]


class ZmqWire:
    """A Wire of ZMQ sockets: a ROUTER for the door, a DEALER for each link."""

    def __init__(
        self,
        config: TransferConfig,
        timers: Timers,
        faults: Faults,
        counters: Counters,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """Listens at once, in the caller's thread; raises CannotListen. `post` runs a callback in the wire's thread."""
        self._config = config
        self._timers = timers
        self._faults = faults
        self._counters = counters
        self._post = post
        self._keys = None if config.curve_key is None else load_keys(Path(config.curve_key))
        self._context = zmq.Context()
        self._guard = None if self._keys is None else guard(self._context, self._keys)
        self._poller = zmq.Poller()
        self._links: dict[Link, zmq.Socket[bytes]] = {}
        self._num_links = 0
        self._probes: set[threading.Thread] = set()
        try:
            self._door, self.port = self._listen()
        except BaseException:
            self._stop_guard()
            self._context.destroy(linger=0)
            raise
        self._poller.register(self._door, zmq.POLLIN)

    @property
    def num_links(self) -> int:
        return len(self._links)

    def reply(self, route: Route, message: Message) -> None:
        self._emit(message, lambda packet: self._door.send_multipart([route, packet], zmq.NOBLOCK))

    def call(self, host: str, port: int) -> Link:
        try:
            dealer = self._dealer(_address(host, port))
        except (OSError, zmq.ZMQError) as error:
            raise UnusableAddress(f"cannot call host={host!r}, port={port}: {error}") from error
        self._num_links += 1
        link = Link(self._num_links)
        self._links[link] = dealer
        self._poller.register(dealer, zmq.POLLIN)
        return link

    def send(self, link: Link, message: Message) -> None:
        self._emit(message, lambda packet: self._send_now(link, packet))

    def hang_up(self, link: Link) -> None:
        dealer = self._links.pop(link, None)
        if dealer is not None:
            self._poller.unregister(dealer)
            dealer.close(linger=LINGER_MS)

    def probe(self, host: str, port: int, then: Callable[[Probe], None]) -> None:
        def run() -> None:
            outcome = probe_address(host, port, PROBE_TIMEOUT_S)
            self._post(lambda: then(outcome))

        self._probes = {thread for thread in self._probes if thread.is_alive()}
        thread = threading.Thread(target=run, name="kvferry-probe", daemon=True)
        self._probes.add(thread)
        thread.start()

    def watch(self, descriptor: int) -> None:
        """Let `wait` also end when this file descriptor can be read."""
        self._poller.register(descriptor, zmq.POLLIN)

    def wait(self, timeout_s: float | None) -> list[Packet]:
        """What has come in, after at most `timeout_s`; bounded, the rest next time."""
        ready = dict(self._poller.poll(None if timeout_s is None else int(timeout_s * 1000) + 1))
        packets = list(self._drain(self._door, b"")) if self._door in ready else []
        for link, dealer in self._links.items():
            if dealer in ready:
                packets.extend(self._drain(dealer, link))
        return packets

    def close(self) -> None:
        """Closes every socket, and waits for probes under way; bounded by the linger and probe times."""
        for link in list(self._links):
            self.hang_up(link)
        self._door.close(linger=LINGER_MS)
        self._stop_guard()
        self._context.term()
        for thread in self._probes:
            thread.join(PROBE_TIMEOUT_S + 1)

    def _stop_guard(self) -> None:
        if self._guard is not None:
            self._guard.stop()

    def _drain(self, source: "zmq.Socket[bytes]", link: int | bytes) -> Iterator[Packet]:
        for _ in range(MAX_PACKETS_A_TURN):
            try:
                frames = source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield Packet(link, frames) if isinstance(link, int) else Packet(frames[0], frames[1:])

    def _emit(self, message: Message, send: Callable[[bytes], object]) -> None:
        packet = codec.encode(message, self._config.max_message_bytes)
        for delay_s in self._faults.outgoing(message):
            if delay_s <= 0:
                self._attempt(send, packet)
            else:
                self._timers.after(delay_s, lambda: self._attempt(send, packet))

    def _attempt(self, send: Callable[[bytes], object], packet: bytes) -> None:
        try:
            send(packet)
            self._counters.add("messages_out")
        except zmq.ZMQError:
            # Full, or the connection just broke: like any lost message.
            self._counters.add("messages_lost")

    def _send_now(self, link: Link, packet: bytes) -> None:
        dealer = self._links.get(link)
        if dealer is not None:
            dealer.send(packet, zmq.NOBLOCK)

    def _listen(self) -> tuple["zmq.Socket[bytes]", int]:
        door = self._socket(zmq.ROUTER)
        door.router_handover = True
        host, port = self._config.bind_host, self._config.port
        try:
            door.bind(_tcp(_numeric(host), port or "*"))
        except (OSError, zmq.ZMQError) as error:
            raise CannotListen(
                f"cannot listen at host={host!r} (setting bind_host), port={port} (setting port): {error}"
            ) from error
        return door, int(door.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def _dealer(self, address: str) -> "zmq.Socket[bytes]":
        dealer = self._socket(zmq.DEALER)
        try:
            dealer.routing_id = b"k" + secrets.token_bytes(15)
            dealer.reconnect_ivl, dealer.reconnect_ivl_max = RECONNECT_MS, RECONNECT_LIMIT_MS
            dealer.connect(address)
        except zmq.ZMQError:
            dealer.close(linger=0)
            raise
        return dealer

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        made.ipv6 = True
        made.maxmsgsize = self._config.max_message_bytes
        made.sndhwm = made.rcvhwm = MAX_QUEUED
        if self._keys is not None:
            lock(made, self._keys)
        return made


def probe_address(host: str, port: int, timeout_s: float) -> Probe:
    """Whether anybody listens there. "refused" is proof that the process is gone or has closed its door."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "silent"
    return "open"


def _numeric(host: str) -> str:
    """The address of a host name; ZMQ listens at addresses only."""
    if host in ("*", ""):
        return "0.0.0.0"
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _address(host: str, port: int) -> str:
    """Where ZMQ is to connect, without a name to look up; raises UnusableAddress."""
    host = _numeric(host) if host == "localhost" else host
    try:
        if not 0 < port < 65536:
            raise ValueError("a port is 1 to 65535")
        ipaddress.ip_address(host)
    except ValueError as error:
        raise UnusableAddress(
            f"not an address to call: host={host[:80]!r}, port={port}: {error}; "
            "a host is given by its numeric address, names are not looked up"
        ) from error
    return _tcp(host, port)


def _tcp(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
