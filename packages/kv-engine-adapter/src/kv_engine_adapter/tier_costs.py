"""What computing and loading cost an engine: given by its operator, or measured.

In:  the terms; what ranks measured at their start; when the engine's steps began and ended, and with how many tokens.
Out: whether loading pays; the costs and the break-even point as gauges, and once as a line of the log.
Law: what is given is not measured. A sample is bounded by what is known already, so that no pause, compilation or
     stall carries the estimate away. Whatever the costs say, it decides about speed alone.

A step's time runs from where it was ordered, or where the step before it ended, to its end: engines order ahead.
"""

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from kv_engine_adapter.tier_orders import Rates
from kv_engine_adapter.tier_terms import BreakEven, TierTerms

logger = logging.getLogger(__name__)

MIN_PROMPT_TOKENS: Final = 64
"""Of a step whose time tells what computing a prompt costs; they are at least half of the step's tokens."""
MAX_GROWTH: Final = 4.0
"""A sample counts as at most so many times the estimate."""
MAX_TOKEN_S: Final = 1e-2
MAX_START_S: Final = 0.25
_WEIGHT: Final = 0.2
"""Of a new sample."""
_MAX_AHEAD: Final = 8
"""Steps that may have been ordered and have not ended."""


class _Step(NamedTuple):
    began: float
    num_prompt_tokens: int
    num_tokens: int


class TierCosts:
    """Of one engine, as far as they are known."""

    def __init__(self, terms: TierTerms, clock: Callable[[], float]) -> None:
        self._terms = terms
        self._clock = clock
        self.break_even: BreakEven = terms.break_even
        self._steps: deque[_Step] = deque(maxlen=_MAX_AHEAD)
        self._last_end = -math.inf
        self._awaited = set(terms.measured) - {"start_s", "" if terms.has_disk else "disk_byte_s"}

    def pays(self, num_tokens: int, *, from_disk: bool) -> bool:
        """Whether to load so many tokens; less than one never pays."""
        return num_tokens > 0 and self.break_even.pays(num_tokens, self._terms.bytes_per_token, from_disk=from_disk)

    def heard(self, rates: Rates) -> None:
        """What a rank measured; of several the slowest counts, since all copy at once."""
        for name, token_s in (("host_byte_s", rates.host_token_s), ("disk_byte_s", rates.disk_token_s)):
            if token_s is not None and name in self._terms.measured:
                byte_s = token_s / self._terms.bytes_per_token
                self._set(name, byte_s if name in self._awaited else max(byte_s, getattr(self.break_even, name)))

    def step_began(self, num_prompt_tokens: int, num_tokens: int) -> None:
        """The engine has ordered a step of so many tokens, some of them of prompts."""
        self._steps.append(_Step(self._clock(), num_prompt_tokens, num_tokens))

    def step_ended(self) -> None:
        """The first step that was ordered and has not ended has ended."""
        if not self._steps:
            return
        step, now = self._steps.popleft(), self._clock()
        took, self._last_end = now - max(step.began, self._last_end), now
        if step.num_prompt_tokens >= max(MIN_PROMPT_TOKENS, step.num_tokens / 2):
            known = self.break_even.recompute_token_s or MAX_TOKEN_S
            self._learn("recompute_token_s", min(took / step.num_tokens, MAX_GROWTH * known, MAX_TOKEN_S))
        elif not step.num_prompt_tokens:
            self._learn("start_s", min(took, MAX_START_S))

    def gauges(self) -> dict[str, float]:
        """Rounded, so that what hardly moves is not told again."""
        even, size = self.break_even, self._terms.bytes_per_token
        found = {
            "tier_recompute_token_s": even.recompute_token_s,
            "tier_host_token_s": even.host_byte_s * size,
            "tier_break_even_host_tokens": even.from_tokens(size, from_disk=False),
        }
        if self._terms.has_disk:
            found["tier_disk_token_s"] = even.disk_byte_s * size
            found["tier_break_even_disk_tokens"] = even.from_tokens(size, from_disk=True)
        return {name: float(f"{value:.2g}") for name, value in found.items()}

    def _learn(self, name: str, sample: float) -> None:
        if name in self._terms.measured:
            known: float = getattr(self.break_even, name)
            self._set(name, sample if name in self._awaited else known + _WEIGHT * (sample - known))

    def _set(self, name: str, value: float) -> None:
        self.break_even = dataclasses.replace(self.break_even, **{name: max(0.0, value)})
        if name in self._awaited:
            self._awaited.remove(name)
            if not self._awaited:
                self._log()

    def _log(self) -> None:
        told = self.gauges()
        disk = (
            f", from {told['tier_break_even_disk_tokens']:g} tokens of disk ({told['tier_disk_token_s']:g} s)"
            if self._terms.has_disk
            else ""
        )
        logger.info(
            "kvferry: tiers: loading pays from %g tokens of host memory (%g s a token)%s; computing one costs %g s",
            told["tier_break_even_host_tokens"], told["tier_host_token_s"], disk, told["tier_recompute_token_s"],
        )  # fmt: skip
