"""Every knob of the transfer layer, in one frozen value.

In:  keyword arguments, each with a default that suits one host.
Out: a TransferConfig that is valid as a whole.
Law: nothing else configures this layer: no environment variable, no module state. A value that is out of range, or
     contradicts another, raises ConfigError naming the setting and both values.
"""

import ipaddress
from dataclasses import dataclass
from typing import Final

from kv_core.errors import CallerError
from kv_transfer.agent.cards import MemoryKind
from kv_transfer.protocol.codec import MAX_MESSAGE_BYTES

WILDCARDS: Final = frozenset({"0.0.0.0", "::", "*", ""})
"""Addresses one can listen at, but nobody can call."""

MIB: Final = 1 << 20


CHUNK_BYTES: Final = {"cpu": 8 * MIB, "cuda": 64 * MIB}
"""Default of `chunk_bytes`. Why more on a GPU: copying 8 MiB takes 4 us, its launch and messages far more."""


def default_chunk_bytes(device_type: str) -> int:
    """The default of `chunk_bytes` for caches on such a device ("cpu", "cuda")."""
    return CHUNK_BYTES.get(device_type, CHUNK_BYTES["cpu"])


IN_PLACE_RUN_BYTES: Final = {"host": 16 << 10, "device": 1 << 20}
"""Default of `in_place_run_bytes`. Evidence: tools/bench/transfer.py for host memory; on an H200 a NIXL read of 64 KiB
runs carries 14 GB/s, that is 4.7 us a run, in which the staged path carries 0.5 MB (docs/tuning.md)."""


class ConfigError(CallerError):
    """A setting is out of range or contradicts another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Settings of one rank's or one instance's transfer layer. Times are seconds, sizes are bytes.

    More than seven fields, because this is the one place where they are.
    """

    bind_host: str = "127.0.0.1"
    """Address to listen at."""
    advertised_host: str | None = None
    """Numeric address that peers are told to call; `bind_host` if None, which then may not be a wildcard."""
    curve_key: str | None = None
    """File of the key pair that all engines of a deployment share (`kvferry keygen`); None: nothing is encrypted."""
    port: int = 0
    """Port to listen at; 0: any free one."""

    lease_s: float = 30.0
    """How long an offer waits for its consumers, from its opening or from a consumer's last renewal."""
    max_lease_s: float = 600.0
    """How long an offer waits at most, however often it is renewed."""
    renew_s: float = 5.0
    """How often the leases of remote offers that our requests wait for are renewed."""
    request_deadline_s: float = 30.0
    """How long a load may take, from order to last block; also the longest that a sender serves one session."""
    release_deadline_s: float = 60.0
    """How long the release of a remote offer is repeated."""
    peer_timeout_s: float = 1.0
    """Silence after which a peer we wait for is probed; it is dead only if it refuses to be called."""
    peer_idle_s: float = 600.0
    """Silence after which a peer we want nothing from is forgotten."""
    nudge_s: float = 1.0
    """First pause before an unanswered message is repeated; doubles up to `nudge_limit_s`."""
    nudge_limit_s: float = 5.0
    tombstone_s: float = 600.0
    """How long the end of a session or an offer is remembered."""

    chunk_bytes: int | None = None
    """Largest chunk; a pair of ranks uses the smaller of both limits. None: as large as `default_chunk_bytes` says for
    the device, and as the arenas hold."""
    send_arena_bytes: int = 256 * MIB
    receive_arena_bytes: int = 256 * MIB
    chunks_in_flight: int = 4
    """Most chunks of one session that are granted, or being written, at once."""
    checksum: bool = True
    """Ask senders for a checksum of every chunk and verify it before anything is scattered."""

    direct: bool = True
    """Map the caches of peers on this host, and let them map ours, where the hardware can; else all is staged."""
    unmap_idle_s: float = 30.0
    """How long the caches of a peer stay mapped without use. While they are, a dead peer's memory stays taken."""

    stall_s: float = 10.0
    """How long a thread of ours may stay in one call (a post, a copy) before nothing new is begun until it returns."""

    share_in_place: bool = False
    """Register the caches with the agent, so that peers may read them in place."""
    own_blocks: bool = False
    """The caches are memory of our own, not an engine's: the wire may write them. What lies in long runs at a peer that
    shares its caches is then read in place, without staging; without a checksum, as on the direct path."""
    in_place_run_bytes: int | None = None
    """Shortest run that is read in place rather than staged. None: as `IN_PLACE_RUN_BYTES` says for the memory."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_sessions: int = 4096
    """Most sessions and parked asks that a sender keeps open; more are refused as busy."""

    def __post_init__(self) -> None:
        self._check_address()
        for field in (
            "lease_s",
            "max_lease_s",
            "renew_s",
            "unmap_idle_s",
            "stall_s",
            "request_deadline_s",
            "release_deadline_s",
            "peer_timeout_s",
            "peer_idle_s",
        ):
            _check_range(field, getattr(self, field), 0.001, 86_400)
        for field in ("nudge_s", "nudge_limit_s", "tombstone_s"):
            _check_range(field, getattr(self, field), 0.001, 86_400)
        _check_range("chunks_in_flight", self.chunks_in_flight, 1, 1024)
        _check_range("max_sessions", self.max_sessions, 1, 1 << 20)
        _check_range("max_message_bytes", self.max_message_bytes, 4096, 1 << 30)
        if self.in_place_run_bytes is not None:
            _check_range("in_place_run_bytes", self.in_place_run_bytes, 1, 1 << 40)
        least = 64 if self.chunk_bytes is None else self.chunk_bytes
        _check_range("chunk_bytes", least, 64, 1 << 40)
        for field in ("send_arena_bytes", "receive_arena_bytes"):
            _check_range(field, getattr(self, field), least, 1 << 44)

    def _check_address(self) -> None:
        _check_range("port", self.port, 0, 65535)
        if self.advertised_host is None and self.bind_host in WILDCARDS:
            raise ConfigError(
                f"advertised_host is needed when bind_host is a wildcard: bind_host={self.bind_host!r}, "
                "advertised_host=None"
            )
        if self.advertised_host is not None and self.advertised_host in WILDCARDS:
            raise ConfigError(f"nobody can call a wildcard: advertised_host={self.advertised_host!r}")
        try:
            ipaddress.ip_address("127.0.0.1" if self.call_host == "localhost" else self.call_host)
        except ValueError as error:
            raise ConfigError(
                f"peers call numeric addresses only: got={self.call_host!r}; set advertised_host to an address of ours"
            ) from error

    def least_run_bytes(self, memory: MemoryKind) -> int:
        """The shortest run that is read in place, between caches in such memory."""
        return IN_PLACE_RUN_BYTES[memory] if self.in_place_run_bytes is None else self.in_place_run_bytes

    @property
    def call_host(self) -> str:
        """The host that peers are told to call."""
        return self.bind_host if self.advertised_host is None else self.advertised_host


def _check_range(field: str, got: float, least: float, most: float) -> None:
    if not least <= got <= most:
        raise ConfigError(f"{field} is out of range: got={got}, allowed={least}..{most}")
