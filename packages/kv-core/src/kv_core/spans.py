"""One half-open interval type for tokens, blocks, layers and heads.

In:  two integers.
Out: `Span`, with intersection, covering and the blocks that hold it.
Law: `start <= stop`; the empty span is falsy and covers nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kv_core.errors import CallerError


def ceil_div(numerator: int, denominator: int) -> int:
    """The smallest integer not below `numerator / denominator`."""
    return -(-numerator // denominator)


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The integers `start <= i < stop`."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.stop < self.start:
            raise CallerError(f"a span ends before it starts: start={self.start}, stop={self.stop}")

    def __len__(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        return self.stop > self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, item: int) -> bool:
        return self.start <= item < self.stop

    def __and__(self, other: "Span") -> "Span":
        """The common part; empty (at our own start) when there is none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else Span(self.start, self.start)

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def covers(self, other: "Span") -> bool:
        """Whether every integer of `other` is ours too."""
        return not other or (self.start <= other.start and other.stop <= self.stop)

    def blocks(self, tokens_per_block: int) -> "Span":
        """Ordinals of the blocks that hold these tokens."""
        if not self:
            return Span(self.start // tokens_per_block, self.start // tokens_per_block)
        return Span(self.start // tokens_per_block, ceil_div(self.stop, tokens_per_block))
