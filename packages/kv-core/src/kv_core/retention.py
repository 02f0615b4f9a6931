"""How long the blocks of a request should be kept, as the request says it (core spec 13).

In:  priorities for ranges of prompt tokens, a priority for decoded tokens, each with an optional duration.
Out: the wish for each block of the prompt, as runs of equal wishes or one by one.
Law: priorities lie in 0..100 and a higher one is kept longer; ranges are disjoint and ascending. A block gets the
     strongest wish among all ranges that overlap it, so that no range is lost however short it is (core spec D45).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final

from kv_core.errors import CallerError
from kv_core.spans import Span, ceil_div

DEFAULT_PRIORITY: Final = 35
MIN_PRIORITY: Final = 0
MAX_PRIORITY: Final = 100


@dataclass(frozen=True, slots=True)
class Retention:
    """What a request wishes for one block.

    `priority` None leaves the block's priority as it is, or the default on a fresh block. `duration_ms` counts from the
    moment when nobody holds the block any more; then the priority falls to the default. None means for ever.
    """

    priority: int | None = None
    duration_ms: int | None = None

    def stronger(self, other: "Retention") -> "Retention":
        """The wish with the higher priority; among equal ones the longer duration."""
        return max(self, other, key=_strength)


UNSET: Final = Retention()


@dataclass(frozen=True, slots=True)
class RangeRetention:
    """The wish for prompt tokens `start <= i < stop`; `stop` None means up to the end of the prompt."""

    start: int
    stop: int | None
    priority: int = DEFAULT_PRIORITY
    duration_ms: int | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or (self.stop is not None and self.stop <= self.start):
            raise CallerError(f"a range holds at least one token from 0 on: start={self.start}, stop={self.stop}")
        _check(self.priority, self.duration_ms)

    @property
    def retention(self) -> Retention:
        return Retention(self.priority, self.duration_ms)

    def blocks(self, tokens_per_block: int, num_tokens: int) -> Span:
        """Ordinals of the blocks that hold a token of the range, in a prompt of `num_tokens`."""
        stop = num_tokens if self.stop is None else min(self.stop, num_tokens)
        return Span(min(self.start, stop), stop).blocks(tokens_per_block)


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """The wishes of one request. Ranges may be given in any order; they must not overlap (core spec 13.2)."""

    ranges: tuple[RangeRetention, ...] = ()
    decode_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: int | None = None

    def __post_init__(self) -> None:
        _check(self.decode_priority, self.decode_duration_ms)  # core spec D21
        object.__setattr__(self, "ranges", tuple(sorted(self.ranges, key=lambda wish: wish.start)))
        for before, after in pairwise(self.ranges):
            if before.stop is None or before.stop > after.start:
                raise CallerError(f"ranges overlap: {before}, {after}")

    @property
    def decode(self) -> Retention:
        """The wish for each block that decoding adds."""
        return Retention(self.decode_priority, self.decode_duration_ms)

    def runs(self, tokens_per_block: int, num_tokens: int) -> tuple[tuple[Span, Retention], ...]:
        """Runs of blocks with one wish, in order, covering every block of a prompt of `num_tokens` exactly once.

        Cost is that of the ranges, whatever the length of the prompt.
        """
        num_blocks = ceil_div(num_tokens, tokens_per_block)
        spans = [(wish.blocks(tokens_per_block, num_tokens), wish.retention) for wish in self.ranges]
        cuts = sorted({0, num_blocks, *(cut for span, _ in spans for cut in (span.start, span.stop))})
        pieces = ((Span(*cut), _strongest(Span(*cut), spans)) for cut in pairwise(cuts))
        return tuple(_merged(pieces))

    def per_block(self, tokens_per_block: int, num_tokens: int) -> tuple[Retention, ...]:
        """The wish for each of the `ceil(num_tokens / tokens_per_block)` blocks of a prompt (core spec 13.3, D45)."""
        return tuple(wish for span, wish in self.runs(tokens_per_block, num_tokens) for _ in span)


def _strength(wish: Retention) -> tuple[int, float]:
    priority = -1 if wish.priority is None else wish.priority
    return priority, float("inf") if wish.duration_ms is None else wish.duration_ms


def _check(priority: int, duration_ms: int | None) -> None:
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise CallerError(f"priority outside of {MIN_PRIORITY}..{MAX_PRIORITY}: priority={priority}")
    if duration_ms is not None and duration_ms < 0:
        raise CallerError(f"a duration is not negative: duration_ms={duration_ms}")


def _strongest(span: Span, spans: Iterable[tuple[Span, Retention]]) -> Retention:
    return max((wish for wished, wish in spans if span & wished), key=_strength, default=UNSET)


def _merged(pieces: Iterable[tuple[Span, Retention]]) -> Iterator[tuple[Span, Retention]]:
    """Neighbours with one wish as one run."""
    for wish, group in groupby(pieces, key=lambda piece: piece[1]):
        spans = [span for span, _ in group]
        yield Span(spans[0].start, spans[-1].stop), wish
