"""Which host slots hold the parts of cache groups with windows, and how many tokens they serve.

In:  slots that were filled, and with which groups' parts.
Out: the longest prefix whose next token finds all that it sees; what a copy has to bring, and what it leaves out.
Law: a part is held exactly as long as the slot keeps its content. A group without a window has a part in every slot
     that is found. A window asks for whole blocks, as everywhere: they become prefixes that others share.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kv_core.spans import Span
from kv_engine_adapter.orders import Tables
from kv_engine_adapter.tier_orders import Absent
from kv_engine_adapter.tier_terms import TierTerms
from kv_transfer.plan.ranges import HOLE

NO_GROUPS: frozenset[int] = frozenset()


class Wanted(NamedTuple):
    """What is to be brought into slots: tokens from a block's first one on, and what is left out of them."""

    tokens: Span
    absent: Absent = ()


class WindowParts:
    """The parts in the slots of one engine."""

    def __init__(self, terms: TierTerms, generation: Callable[[int], int]) -> None:
        """`generation` of a slot changes with its content."""
        self._terms = terms
        self._generation = generation
        self._held: dict[int, tuple[int, frozenset[int]]] = {}

    def groups_of(self, slot: int) -> frozenset[int]:
        """The groups with a window whose part is in this slot."""
        generation, groups = self._held.get(slot, (0, NO_GROUPS))
        return groups if groups and self._generation(slot) == generation else NO_GROUPS

    def filled(self, slots: Mapping[int, frozenset[int]]) -> None:
        """Slots hold parts of these groups, beside those they held."""
        for slot, groups in slots.items():
            if groups:
                self._held[slot] = self._generation(slot), self.groups_of(slot) | groups

    def served(self, num_tokens: int, slots: Sequence[int]) -> int:
        """How many of the tokens in these slots are of use to the token behind them."""
        while num_tokens and (gap := self._last_gap(num_tokens, slots)) is not None:
            num_tokens = gap * self._terms.tokens_per_block
        return num_tokens

    def absent_with(self, slots: Sequence[int], brought: Wanted) -> Absent:
        """What the slots of a prompt, from its first on, will not hold when that has been brought into them."""
        if not self._terms.windowed:
            return ()
        first, held = brought.tokens.start // self._terms.tokens_per_block, [self.groups_of(slot) for slot in slots]
        return tuple(
            frozenset(
                at
                for at, groups in enumerate(held)
                if group not in groups and (at < first or at in brought.absent[group])
            )
            if window
            else frozenset()
            for group, window in enumerate(self._terms.windows)
        )

    def to_save(self, held: Sequence[int], num_held: int, tokens: Span, tables: Tables) -> Wanted | None:
        """What the tables have of `tokens` that the slots, which hold the first `num_held`, lack; None if nothing.

        Also None if something before those tokens is lacking: what follows it would not be found.
        """
        size = self._terms.tokens_per_block
        first, fresh = tokens.start // size, self._terms.from_block(num_held, tokens.stop).start // size
        if fresh < first:
            return None
        there = {
            group: [at for at in Span(first * size, tokens.stop).blocks(size) if tables[group][at] != HOLE]
            for group in self._terms.windowed
        }
        return self._wanted(held, num_held, tokens.stop, there)

    def to_fetch(self, held: Sequence[int], num_held: int, num_tokens: int) -> Wanted | None:
        """What the first `num_tokens` need that these slots lack; None if nothing."""
        seen = {group: self._terms.seen_blocks(num_tokens, group) for group in self._terms.windowed}
        return self._wanted(held, num_held, num_tokens, seen)

    def brought(self, slots: Sequence[int], wanted: Wanted, num_tokens: int) -> dict[int, frozenset[int]]:
        """The parts that are in the slots of a prompt once the first `num_tokens` have come."""
        terms = self._terms
        blocks = wanted.tokens.blocks(terms.tokens_per_block)
        whole = blocks.stop if num_tokens >= wanted.tokens.stop else num_tokens // terms.tokens_per_block
        return {
            slots[at]: frozenset(group for group in terms.windowed if at not in wanted.absent[group])
            for at in range(blocks.start, whole)
        }

    def _wanted(
        self, held: Sequence[int], num_held: int, stop: int, there: Mapping[int, Iterable[int]]
    ) -> Wanted | None:
        """`there` are the blocks that can be had of each group with a window; of the others all can."""
        whole = self._terms.from_block(num_held, stop)
        if not there:
            return Wanted(whole) if num_held < stop else None
        blocks = whole.blocks(self._terms.tokens_per_block)
        bring = {
            group: {at for at in each if at in blocks or group not in self.groups_of(held[at])}
            for group, each in there.items()
        }
        first = min((at for each in bring.values() for at in each), default=blocks.start)
        if num_held >= stop and first >= blocks.start:
            return None
        first = min(first, blocks.start)
        every = range(first, blocks.stop)
        absent = tuple(
            frozenset(every).difference(bring[group] if window else blocks)
            for group, window in enumerate(self._terms.windows)
        )
        return Wanted(Span(first * self._terms.tokens_per_block, stop), absent)

    def _last_gap(self, num_tokens: int, slots: Sequence[int]) -> int | None:
        """The last block whose part is seen and lacking."""
        gaps = (self._gap_of(group, num_tokens, slots) for group in self._terms.windowed)
        return max((gap for gap in gaps if gap is not None), default=None)

    def _gap_of(self, group: int, num_tokens: int, slots: Sequence[int]) -> int | None:
        seen = self._terms.seen_blocks(num_tokens, group)
        last_first = range(seen.stop - 1, seen.start - 1, -1)
        return next((at for at in last_first if group not in self.groups_of(slots[at])), None)
