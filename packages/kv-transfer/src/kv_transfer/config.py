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
from kv_transfer.plan.cache_state import MAX_LAYERS
from kv_transfer.protocol.codec import MAX_MESSAGE_BYTES
from kv_transfer.thresholds import ARENA, CHUNK, IN_PLACE_RUN, MIB, Link

WILDCARDS: Final = frozenset({"0.0.0.0", "::", "*", ""})
"""Addresses one can listen at, but nobody can call."""


def default_chunk_bytes(device_type: str) -> int:
    """The default of `chunk_bytes` for caches on such a device ("cpu", "cuda")."""
    return CHUNK.get(device_type, CHUNK["cpu"]).num_bytes


ARENA_BYTES: Final = 256 * MIB
ARENA_SHARE: Final = 64
"""An arena that nobody has asked for takes at most this part of a GPU's memory, or `ARENA_BYTES`."""


def default_arena_bytes(device_bytes: int | None, chunk_bytes: int | None = None) -> int:
    """The default of `send_arena_bytes` and `receive_arena_bytes`; of a GPU of so much memory, or of a host (None).

    Where chunks of a size were asked for it holds two: one alone would wait for the one before it.
    """
    part = 0 if device_bytes is None else device_bytes // ARENA_SHARE
    usual = max(ARENA_BYTES, min(ARENA.num_bytes, 1 << max(0, part.bit_length() - 1)))
    return max(usual, 2 * (chunk_bytes or 0))


MIN_CHUNK_BYTES: Final = 64
MAX_ARENA_BYTES: Final = 1 << 44
_TIME: Final = (0.001, 86_400)
RANGES: Final[dict[str, tuple[float, float]]] = {
    "port": (0, 65535),
    "lease_s": _TIME,
    "max_lease_s": _TIME,
    "max_wait_s": _TIME,
    "renew_s": _TIME,
    "request_deadline_s": _TIME,
    "release_deadline_s": _TIME,
    "peer_timeout_s": _TIME,
    "peer_idle_s": _TIME,
    "nudge_s": _TIME,
    "nudge_limit_s": _TIME,
    "tombstone_s": _TIME,
    "chunk_bytes": (MIN_CHUNK_BYTES, 1 << 40),
    "send_arena_bytes": (MIN_CHUNK_BYTES, MAX_ARENA_BYTES),
    "receive_arena_bytes": (MIN_CHUNK_BYTES, MAX_ARENA_BYTES),
    "layers_per_chunk": (0, MAX_LAYERS),
    "chunks_in_flight": (1, 1024),
    "unmap_idle_s": _TIME,
    "stall_s": _TIME,
    "in_place_run_bytes": (1, 1 << 40),
    "max_message_bytes": (4096, 1 << 30),
    "max_sessions": (1, 1 << 20),
}
"""The least and the most of each number, both allowed. An arena holds at least one chunk."""


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
    max_wait_s: float = 3600.0
    """How long a prompt that is offered before it is computed may wait for that; its lease begins then."""
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
    """Longest pause before an unanswered message is repeated."""
    tombstone_s: float = 600.0
    """How long the end of a session or an offer is remembered."""

    chunk_bytes: int | None = None
    """Largest chunk; a pair of ranks uses the smaller of both limits. None: 256 MiB on a GPU, else 8 MiB
    (`default_chunk_bytes`), and at most a quarter of an arena."""
    send_arena_bytes: int | None = None
    """Staging memory of each rank for what it sends. None: 256 MiB; on a GPU a 64th of its memory, if that is more, in
    powers of two up to 2 GiB; and at least two chunks, if `chunk_bytes` is set."""
    receive_arena_bytes: int | None = None
    """Staging memory of each rank for what it receives. None: as `send_arena_bytes`."""
    layers_per_chunk: int = 0
    """Most layers of one chunk that we take, so that the first layers of a step travel while the others are computed:
    where a sender's engine tells of layers (`Transceiver.advance`). 0: all of them together."""
    chunks_in_flight: int = 4
    """Most chunks of one session that are granted, or being written, at once."""
    checksum: bool = True
    """Ask senders for a checksum of every staged chunk, and verify it: before its scatter, or on a GPU with it."""

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
    """Shortest run that is read in place rather than staged. None: 16 KiB through shared memory,
    1 MiB on a GPU, none over a network to host memory (`thresholds.IN_PLACE_RUN`)."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Longest control message that is taken or said."""
    max_sessions: int = 4096
    """Most sessions and parked asks that a sender keeps open; more are refused as busy."""

    def __post_init__(self) -> None:
        self._check_address()
        for field, (least, most) in RANGES.items():
            if (got := getattr(self, field)) is not None:
                _check_range(field, got, least, most)
        for field in ("send_arena_bytes", "receive_arena_bytes"):
            arena_bytes = getattr(self, field)
            if arena_bytes is not None and arena_bytes < (self.chunk_bytes or 0):
                both = f"chunk_bytes={self.chunk_bytes}, {field}={arena_bytes}"
                raise ConfigError(f"a chunk does not fit into an arena: {both}; raise {field}, or lower chunk_bytes")

    def _check_address(self) -> None:
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

    def least_run_bytes(self, link: Link) -> int:
        """The shortest run that is read in place, over such a link."""
        return IN_PLACE_RUN[link].num_bytes if self.in_place_run_bytes is None else self.in_place_run_bytes

    @property
    def call_host(self) -> str:
        """The host that peers are told to call."""
        return self.bind_host if self.advertised_host is None else self.advertised_host


def _check_range(field: str, got: float, least: float, most: float) -> None:
    if not least <= got <= most:
        raise ConfigError(f"{field} is out of range: got={got}, allowed={least}..{most}")
