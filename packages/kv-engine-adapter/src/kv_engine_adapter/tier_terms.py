"""What the tiers are built from: sizes, limits of time, and when loading pays.

Law: values only. All times are seconds, all sizes bytes.
"""

import math
from dataclasses import dataclass

from kv_core.errors import CallerError
from kv_core.spans import Span
from kv_transfer.plan.plan import seen_by_next


@dataclass(frozen=True, slots=True)
class BreakEven:
    """What it costs to compute tokens against what it costs to load them.

    `recompute_token_s` of one token; `host_byte_s` and `disk_byte_s` of one byte; `start_s` of any load, however short.
    """

    recompute_token_s: float
    host_byte_s: float
    disk_byte_s: float
    start_s: float = 0.0

    def __post_init__(self) -> None:
        costs = self.recompute_token_s, self.host_byte_s, self.disk_byte_s, self.start_s
        if not all(cost >= 0 for cost in costs):  # also if one is no number
            raise CallerError(f"costs are not negative: {self}")

    def pays(self, num_tokens: int, bytes_per_token: int, *, from_disk: bool) -> bool:
        """Whether loading so many tokens is faster than computing them. From the disk they come through the host."""
        byte_s = self.host_byte_s + (self.disk_byte_s if from_disk else 0.0)
        return num_tokens * self.recompute_token_s > self.start_s + num_tokens * bytes_per_token * byte_s

    def from_tokens(self, bytes_per_token: int, *, from_disk: bool) -> float:
        """From how many tokens on loading pays; infinity if it never does."""
        byte_s = self.host_byte_s + (self.disk_byte_s if from_disk else 0.0)
        gain_s = self.recompute_token_s - bytes_per_token * byte_s
        return math.floor(self.start_s / gain_s) + 1 if gain_s > 0 else math.inf


COSTS = ("recompute_token_s", "host_byte_s", "disk_byte_s", "start_s")
"""The fields of a `BreakEven`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTerms:
    """The tiers of one engine.

    `num_slots` host slots, each for a block of `tokens_per_block`; `bytes_per_token` of all ranks together;
    `max_tokens` of the longest request; a request waits at most `disk_wait_s` for the disk; a copy between device and
    host begins within `copy_within_s` or has failed. Costs that are `measured` are guesses until then. The engine makes
    `hashes_per_block` of each block (0: nobody wants to hear which blocks are in the tiers). `windows` has for each of
    the model's cache groups how many tokens it keeps, 0 for all; they slide, or are chunks of that many tokens.
    """

    tokens_per_block: int
    num_slots: int
    bytes_per_token: int
    max_tokens: int
    num_ranks: int
    break_even: BreakEven
    measured: frozenset[str] = frozenset()
    has_disk: bool = False
    disk_wait_s: float = 2.0
    copy_within_s: float = 30.0
    hashes_per_block: int = 0
    windows: tuple[int, ...] = (0,)
    is_chunked: bool = False

    def __post_init__(self) -> None:
        if min(self.num_slots, self.tokens_per_block, self.bytes_per_token, self.num_ranks) < 1:
            raise CallerError(f"a tier has room for a block: {self}")
        if self.max_tokens < self.tokens_per_block or min(self.disk_wait_s, self.copy_within_s) < 0:
            raise CallerError(f"a request may have a block of tokens, and times are not negative: {self}")
        if not self.windows or min(self.windows) < 0:
            raise CallerError(f"a model has a cache group, and no window is negative: windows={self.windows}")
        if not self.measured <= set(COSTS):
            raise CallerError(f"costs are measured: got={sorted(self.measured)}, known={COSTS}")

    @property
    def capacity(self) -> int:
        """Tokens that the host tier can hold of one request."""
        return self.num_slots * self.tokens_per_block

    @property
    def max_written_slots(self) -> int:
        """Host slots that may wait for the disk, all writes together: the rest stays free for what comes."""
        return max(1, self.num_slots // 4)

    @property
    def windowed(self) -> tuple[int, ...]:
        """The groups that have a window."""
        return tuple(group for group, window in enumerate(self.windows) if window)

    def seen_blocks(self, num_tokens: int, group: int) -> Span:
        """Ordinals of the blocks of a group that the token behind so many sees: one window, or all of them."""
        seen = seen_by_next(Span(0, num_tokens), self.windows[group], chunked=self.is_chunked)
        return seen.blocks(self.tokens_per_block)

    def from_block(self, num_held: int, num_tokens: int) -> Span:
        """What is to be filled if so many of the tokens are held: from a block's first token on, and never nothing."""
        return Span(min(num_held, num_tokens - 1) // self.tokens_per_block * self.tokens_per_block, num_tokens)
