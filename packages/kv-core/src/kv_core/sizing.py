"""From memory to blocks, and from blocks to what fits into them (core spec 10.4 and 11).

In:  bytes of memory and bytes of a block for each window, or lengths of sequences.
Out: blocks of each window, shares of memory, batch sizes, the largest window.
Law: exact integers and fractions throughout. What is handed out never exceeds the memory it was made from (core spec
     D28), and what a function says to fit needs no more blocks than there are (D27).

Bytes of a block count every pool of its window: keys and values, scales of 4-bit elements, indexer keys.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from kv_core.errors import CallerError, CapacityError
from kv_core.spans import ceil_div

DEFAULT_MEMORY_FRACTION: Final = Fraction(9, 10)
SLIDING_BLOCKS: Final = 1
"""A sliding window straddles one block more than it is long."""

Number = int | str | float | Fraction
"""A share as configuration spells it; a float counts as the decimal number that it prints as."""


@dataclass(frozen=True, slots=True)
class NumBlocks:
    """Blocks of one window: in the primary level (device) and in the secondary (host)."""

    primary: int
    secondary: int = 0


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes for the blocks of one cache: in the primary and in the secondary level."""

    primary_bytes: int
    secondary_bytes: int = 0

    def __post_init__(self) -> None:
        if min(self.primary_bytes, self.secondary_bytes) < 0:
            raise CapacityError(f"memory is not negative: {self}")

    def without(self, num_bytes: int) -> "Budget":
        """What is left when `num_bytes` of the primary level serve another purpose."""
        if num_bytes > self.primary_bytes:
            raise CapacityError(f"more set aside than there is: primary={self.primary_bytes}, aside={num_bytes}")
        return Budget(self.primary_bytes - num_bytes, self.secondary_bytes)

    def split(self, cross_fraction: Number) -> tuple["Budget", "Budget"]:
        """The budgets of the self and of the cross cache, which gets `cross_fraction` of both levels."""
        share = _proper_fraction(cross_fraction)
        cross = Budget(int(self.primary_bytes * share), int(self.secondary_bytes * share))
        return Budget(self.primary_bytes - cross.primary_bytes, self.secondary_bytes - cross.secondary_bytes), cross


def memory_budget(
    free_bytes: int, total_bytes: int, host_bytes: int = 0, fraction: Number = DEFAULT_MEMORY_FRACTION
) -> Budget:
    """`fraction` of the free device memory, and all of `host_bytes` (core spec 11.1)."""
    if not 0 <= free_bytes <= total_bytes:
        raise CallerError(f"more memory free than there is: free={free_bytes}, total={total_bytes}")
    return Budget(int(free_bytes * _proper_fraction(fraction)), host_bytes)


# Shares: how windows divide the memory.


def equal_shares(windows: Iterable[int]) -> dict[int, Fraction]:
    """The same memory for each window."""
    ordered = sorted(windows)
    return {window: Fraction(1, len(ordered)) for window in ordered}


def equal_token_shares(block_bytes: Mapping[int, int]) -> dict[int, Fraction]:
    """The same number of tokens for each window: memory in proportion to the bytes of a block."""
    return _normalised({window: Fraction(num_bytes) for window, num_bytes in block_bytes.items()})


def proportional_shares(block_bytes: Mapping[int, int]) -> dict[int, Fraction]:
    """Memory in proportion to bytes of a block times window length (core spec 11.3); exact, so it adds up (D20)."""
    return _normalised({window: Fraction(num_bytes * window) for window, num_bytes in block_bytes.items()})


def explicit_shares(windows: Iterable[int], numbers: Sequence[Number] | str) -> dict[int, Fraction]:
    """Configured shares in ascending order of windows, scaled to a sum of 1; a text is split at its commas."""
    ordered = sorted(windows)
    given = numbers.split(",") if isinstance(numbers, str) else numbers
    if len(given) != len(ordered):
        raise CallerError(f"one share a window: windows={ordered}, shares={list(given)}")
    shares = {window: _fraction(number) for window, number in zip(ordered, given, strict=True)}
    if not all(0 <= share <= 1 for share in shares.values()):
        raise CallerError(f"a share lies between 0 and 1: windows={ordered}, shares={list(given)}")
    return _normalised(shares)


# Memory to blocks.


def blocks_for_memory(
    block_bytes: Mapping[int, int],
    budget: Budget,
    *,
    tokens_per_block: int,
    shares: Mapping[int, Fraction] | None = None,
    max_tokens: int | None = None,
) -> dict[int, NumBlocks]:
    """Blocks of each window, ascending; both levels rounded down to whole blocks (core spec 11.2).

    `block_bytes` is by window, over all its pools. `shares` (the same memory for each window when None) sum to 1.
    `max_tokens` caps the primary level of every window at the blocks that hold so many tokens.
    """
    chosen = equal_shares(block_bytes) if shares is None else shares
    _check_shares(block_bytes, chosen)
    cap = None if max_tokens is None else ceil_div(_positive("max_tokens", max_tokens), tokens_per_block)
    return {
        window: _blocks(budget, chosen[window], _positive(f"bytes of a block, window {window}", num_bytes), cap)
        for window, num_bytes in sorted(block_bytes.items())
    }


def agreed_blocks(by_rank: Sequence[Mapping[int, NumBlocks]]) -> dict[int, NumBlocks]:
    """What every rank can hold: the minimum over all ranks, level by level, of values that were gathered before.

    Raises CallerError if ranks differ in their windows.
    """
    windows = sorted(by_rank[0])
    for rank, blocks in enumerate(by_rank):
        if sorted(blocks) != windows:
            raise CallerError(f"ranks differ in windows: rank 0={windows}, rank {rank}={sorted(blocks)}")
    return {
        window: NumBlocks(
            min(blocks[window].primary for blocks in by_rank), min(blocks[window].secondary for blocks in by_rank)
        )
        for window in windows
    }


# Sequences to blocks.


def sink_bubble(sink_tokens: int, tokens_per_block: int) -> int:
    """Unused slots behind the sink tokens, so that the window starts on a block (core spec 7.2)."""
    return -sink_tokens % tokens_per_block


def temporary_window(window: int, max_input_tokens: int, max_batch_tokens: int) -> int:
    """Tokens that paged context attention keeps behind the window, while a longer prompt comes in chunks (7.2)."""
    return max(0, min(max_batch_tokens, max_input_tokens - window))


def blocks_per_beam(num_tokens: int, window: int, tokens_per_block: int, sink_tokens: int = 0) -> int:
    """Blocks of a sequence of one beam, with one more when its window slides (core spec 11.4)."""
    slots = min(num_tokens, window) + sink_bubble(sink_tokens, tokens_per_block)
    return ceil_div(slots, tokens_per_block) + (SLIDING_BLOCKS if num_tokens > window else 0)


@dataclass(frozen=True, slots=True)
class SequenceShape:
    """Lengths of a whole sequence: prompt and output tokens, beams, sink tokens."""

    input_tokens: int
    output_tokens: int
    beam_width: int = 1
    sink_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def num_blocks(self, window: int, tokens_per_block: int) -> int:
        """Blocks of all beams at the end; context blocks inside of the window are shared (core spec 11.4)."""
        if self.beam_width == 1:
            return blocks_per_beam(self.num_tokens, window, tokens_per_block, self.sink_tokens)
        if window <= self.output_tokens:
            return self.beam_width * blocks_per_beam(self.output_tokens, window, tokens_per_block, self.sink_tokens)
        context = min(window, self.num_tokens) - self.output_tokens
        shared = (context + sink_bubble(self.sink_tokens, tokens_per_block)) // tokens_per_block
        unshared = ceil_div(self.output_tokens + context - shared * tokens_per_block, tokens_per_block)
        sliding = SLIDING_BLOCKS if self.num_tokens > window else 0
        return shared + (unshared + sliding) * self.beam_width


def largest_window(shape: SequenceShape, num_blocks: int, tokens_per_block: int) -> int:
    """The largest window, at most the sequence's length, whose sequence fits into `num_blocks`; 0 if none does.

    It is searched in the requirement itself (core spec D27), of which only the ends of its steps are tried.
    """
    bubble, total = sink_bubble(shape.sink_tokens, tokens_per_block), shape.num_tokens
    # A window and the next one need equally many blocks unless a slot boundary of the window, of its context part or
    # of its unshared part lies between them.
    steps = {0, -bubble, shape.output_tokens - bubble - 1}
    ends = {window for step in steps for window in range(step % tokens_per_block, total, tokens_per_block)}
    candidates = ends | {shape.output_tokens, total - 1, total}
    fitting = (window for window in candidates if 0 < window <= total)
    return max((w for w in fitting if shape.num_blocks(w, tokens_per_block) <= num_blocks), default=0)


def largest_batch(shape: SequenceShape, blocks: Mapping[int, NumBlocks], tokens_per_block: int) -> int:
    """How many such sequences all windows can hold at once (core spec 10.4)."""
    return min(have.primary // shape.num_blocks(window, tokens_per_block) for window, have in blocks.items())


def _blocks(budget: Budget, share: Fraction, block_bytes: int, cap: int | None) -> NumBlocks:
    primary = int(budget.primary_bytes * share) // block_bytes
    secondary = int(budget.secondary_bytes * share) // block_bytes
    return NumBlocks(primary if cap is None else min(primary, cap), secondary)


def _check_shares(block_bytes: Mapping[int, int], shares: Mapping[int, Fraction]) -> None:
    if sorted(shares) != sorted(block_bytes):
        raise CallerError(f"one share a window: windows={sorted(block_bytes)}, shares={sorted(shares)}")
    if min(shares.values()) < 0 or sum(shares.values()) != 1:
        raise CallerError(f"shares are not negative and sum to 1: sum={sum(shares.values())}, shares={dict(shares)}")


def _normalised(weights: Mapping[int, Fraction]) -> dict[int, Fraction]:
    total = sum(weights.values())
    if total <= 0:
        raise CallerError(f"shares need a positive sum: {dict(weights)}")
    return {window: weight / total for window, weight in sorted(weights.items())}


def _fraction(number: Number) -> Fraction:
    try:
        return Fraction(str(number).strip())
    except ValueError as error:
        raise CallerError(f"not a number: {number!r}") from error


def _proper_fraction(number: Number) -> Fraction:
    fraction = _fraction(number)
    if not 0 < fraction < 1:
        raise CallerError(f"a fraction of memory lies between 0 and 1: {number!r}")
    return fraction


def _positive(name: str, number: int) -> int:
    if number < 1:
        raise CallerError(f"{name} is at least 1: {number}")
    return number
