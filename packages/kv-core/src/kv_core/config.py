"""What a cache manager is built from, as values.

In:  the windows of the model with their numbers of blocks in each tier, and what the manager may do.
Out: `ManagerConfig`, validated.
Law: windows are distinct and ascending; each has blocks on the device. Nothing is read from the environment.
"""

from dataclasses import dataclass
from enum import Enum

from kv_core.errors import CallerError
from kv_core.spans import ceil_div


class CacheType(Enum):
    """What the cache holds: keys and values of the decoder, keys only (a joint latent), or those of the encoder."""

    SELF = "self"
    SELF_K_ONLY = "self_k_only"
    CROSS = "cross"


class Order(Enum):
    """Which free block goes first among those of the lowest priority."""

    LRU = "lru"
    S3_FIFO = "s3-fifo"


@dataclass(frozen=True, slots=True)
class WindowConfig:
    """Blocks of one attention window, in each tier. `window` counts the latest tokens that its layers still read."""

    window: int
    num_device: int
    num_host: int = 0
    num_disk: int = 0

    def __post_init__(self) -> None:
        if self.window < 1 or self.num_device < 1 or min(self.num_host, self.num_disk) < 0:
            raise CallerError(f"a window has a length and blocks on the device: {self}")
        if self.num_disk and not self.num_host:
            raise CallerError(f"blocks reach the disk through the host: {self}")

    @property
    def num_blocks(self) -> tuple[int, int, int]:
        """Blocks of each tier, device first."""
        return self.num_device, self.num_host, self.num_disk


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerConfig:
    """All that a manager is told at its start (core spec 1.10).

    A window below `max_sequence_length` is a sliding one. `onboard` False keeps every block on the device. Blocks of
    at least `offload_min_priority` move to the next tier instead of being dropped. The last `max_rewind` tokens of a
    request count as unconfirmed: they may be taken back, so a sliding window keeps what it would then need.
    `event_buffer_size` 0 means no events; otherwise it bounds the events that wait for a reader. Under attention data
    parallelism events name `rank`, of `num_ranks`.
    """

    tokens_per_block: int
    windows: tuple[WindowConfig, ...]
    max_sequence_length: int
    max_beam_width: int = 1
    cache_type: CacheType = CacheType.SELF
    reuse: bool = True
    partial_reuse: bool = True
    copy_on_partial: bool = True
    onboard: bool = True
    offload_min_priority: int = 30
    max_rewind: int = 0
    event_buffer_size: int = 0
    order: Order = Order.LRU
    rank: int | None = None
    num_ranks: int | None = None

    def __post_init__(self) -> None:
        if min(self.tokens_per_block, self.max_sequence_length, self.max_beam_width) < 1:
            raise CallerError(f"blocks, sequences and beams are at least 1: {self}")
        if min(self.max_rewind, self.event_buffer_size, self.offload_min_priority) < 0:
            raise CallerError(f"limits are not negative: {self}")
        if (self.rank is None) != (self.num_ranks is None) or not 0 <= (self.rank or 0) < (self.num_ranks or 1):
            raise CallerError(f"a rank is one of so many: rank={self.rank}, num_ranks={self.num_ranks}")
        sizes = [window.window for window in self.windows]
        if not sizes or sizes != sorted(set(sizes)):
            raise CallerError(f"windows are distinct and ascending: windows={sizes}")

    @property
    def max_blocks_per_sequence(self) -> int:
        """Entries of a table of the longest sequence, the same in every window (core spec 7.2)."""
        return ceil_div(self.max_sequence_length, self.tokens_per_block)

    def is_sliding(self, window: int) -> bool:
        """Whether layers of this window stop reading early tokens before the longest sequence ends."""
        return window < self.max_sequence_length
