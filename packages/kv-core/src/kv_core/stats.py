"""Counters of the manager, as values (core spec 14 and D54, D55).

In:  -
Out: `Counters`, which a window counts in; `WindowStats` and `ManagerStats`, which are told.
Law: occupancy is told per tier and never mixed; a rate is 0 where there is nothing to divide by.
"""

from typing import NamedTuple

from kv_core.tiers import Tier


class Counters:
    """Totals of one window since the start; see `WindowStats`."""

    __slots__ = ("allocated", "copied", "dropped", "fresh", "hit_tokens", "missed", "offloaded", "onboarded", "reused")

    def __init__(self) -> None:
        self.allocated = self.fresh = self.reused = self.missed = 0
        self.onboarded = self.offloaded = self.copied = self.dropped = 0
        self.hit_tokens = [0] * len(Tier)


class TierStats(NamedTuple):
    """One tier of one window; `num_free` blocks include cached ones that nobody holds.

    `num_hit_tokens` prompt tokens of admitted requests lay in its blocks; of a sliding window only those are counted
    that the requests still read there.
    """

    num_blocks: int
    num_free: int
    num_hit_tokens: int

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free


class WindowStats(NamedTuple):
    """One window: occupancy by tier (device first), then totals since the start.

    `num_allocated` blocks were taken for requests, `num_fresh` of them gave up no cached content; positions of admitted
    prompts were `num_reused` (whole or in part) or `num_missed`. Copies: `num_onboarded` from a lower tier to the
    device, `num_offloaded` one tier down, `num_copied` for partial matches. `num_dropped` cached blocks were given up.
    """

    window: int
    tiers: tuple[TierStats, ...]
    num_allocated: int
    num_fresh: int
    num_reused: int
    num_missed: int
    num_onboarded: int
    num_offloaded: int
    num_copied: int
    num_dropped: int


class ManagerStats(NamedTuple):
    """All windows, and prompt tokens of admitted requests: how many there were and how many were cached."""

    windows: tuple[WindowStats, ...]
    num_input_tokens: int
    num_cached_tokens: int
    num_external_tokens: int

    @property
    def token_hit_rate(self) -> float:
        """Cached prompt tokens over all prompt tokens."""
        return self.num_cached_tokens / self.num_input_tokens if self.num_input_tokens else 0.0

    def tier_hit_rate(self, tier: Tier) -> float:
        """Prompt tokens found in this tier by the widest window over all prompt tokens.

        The rates of all tiers add up to `token_hit_rate` unless that window slides.
        """
        hits = self.windows[-1].tiers[tier].num_hit_tokens
        return hits / self.num_input_tokens if self.num_input_tokens else 0.0

    @property
    def block_hit_rate(self) -> float:
        """Reused positions over all positions, over all windows."""
        reused = sum(window.num_reused for window in self.windows)
        missed = sum(window.num_missed for window in self.windows)
        return reused / (reused + missed) if reused else 0.0
