"""Calls of an engine's scheduler on its tiers, in few words: requests that begin and end, and what ranks answer."""

from typing import Any

from kv_core.ids import RequestId
from kv_core.keys import Scope
from kv_core.token_log import packed
from kv_engine_adapter.tier import PrefixTiers
from kv_engine_adapter.tier_orders import Answer, FindOnDisk, Prefix, SaveBlocks, tallied
from kv_engine_adapter.tier_terms import BreakEven, TierTerms
from kv_testing.tier_ranks import TierRequest

SIZE = 32
"""Tokens of a block."""
CHEAP = BreakEven(recompute_token_s=1.0, host_byte_s=0.0, disk_byte_s=0.0)


class Clock:
    """Turned by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock, **more: Any) -> Any:
    """PrefixTiers of 40 host slots without a disk, but for what is said otherwise. Untyped: tests name requests "a"."""
    usual: dict[str, Any] = {"tokens_per_block": SIZE, "num_slots": 40, "bytes_per_token": 10, "max_tokens": 4096}
    return PrefixTiers(TierTerms(**(usual | {"num_ranks": 1, "break_even": CHEAP} | more)), clock=clock)


def request(name: str, num_tokens: int, first: int = 0, num_prompt: int | None = None, **more: Any) -> TierRequest:
    """Tokens `first`, `first` + 1, ...; all of them the prompt unless told."""
    return TierRequest(RequestId(name), list(range(first, first + num_tokens)), num_prompt or num_tokens, **more)


def table(num_tokens: int) -> tuple[tuple[int, ...], ...]:
    """The block table of so many tokens."""
    return (tuple(range(100, 100 + -(-num_tokens // SIZE))),)


def answer(tiers: PrefixTiers, *answers: tuple[int, int]) -> Any:
    """Ranks answer (job, tokens that are good)."""
    return tiers.answered(tallied([Answer(*each) for each in answers]))


def save(tiers: PrefixTiers, ended: TierRequest, num_filled: int | None = None) -> SaveBlocks:
    """Let a request end and its blocks be copied."""
    num_filled = ended.num_tokens - 1 if num_filled is None else num_filled
    job = tiers.finished(ended, num_filled, table(num_filled))
    (order,) = tiers.take_orders().jobs
    assert isinstance(order, SaveBlocks)
    assert answer(tiers, (job, num_filled)) == [job]
    return order


def find(tiers: PrefixTiers, asked: TierRequest) -> FindOnDisk:
    """A prompt comes, and the disk is asked for it."""
    assert tiers.num_tokens(asked, 0) is None
    (order,) = tiers.take_orders().jobs
    assert isinstance(order, FindOnDisk)
    assert order.prefix == Prefix(packed(asked.tokens[:-1]), Scope())
    assert tiers.num_tokens(asked, 0) is None
    return order
