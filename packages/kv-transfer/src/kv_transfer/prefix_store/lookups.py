"""How many tokens of a prompt the records of a store serve.

In:  the index of a store, the chain of a prompt, a rank's box of layers and heads.
Out: the longest prefix whose next token finds all that it sees, in every window.
Law: a window asks for whole blocks of the engine's scheduler, as everywhere. Of layers that see all tokens every record
     is needed. What cannot be seen ends the search; OSError if that leaves nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kv_core.spans import Span
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.plan.plan import kept_for_next
from kv_transfer.prefix_store.boxes import Box
from kv_transfer.prefix_store.chain import PrefixChain
from kv_transfer.prefix_store.index import Index
from kv_transfer.prefix_store.windowed import boxes_by_window

MAX_ENDS: Final = 8
"""Records from the end of a prompt among whose shorter forms one is looked for that lacks nothing."""


class HeldRecord(NamedTuple):
    """The longest record that is held of an ordinal, and of which windows it lacks the layers."""

    tokens: Span
    lacking: frozenset[int]


class Served(NamedTuple):
    """How many tokens are served; and whether there would be more if windows were held as well."""

    num_tokens: int
    is_cut: bool


class Lookup:
    """Of one prompt, for one rank."""

    def __init__(self, index: Index, chain: PrefixChain, state: CacheState, box: Box) -> None:
        self._index = index
        self._chain = chain
        self._state = state
        self._wanted = boxes_by_window(box, state)

    def served(self) -> Served:
        """What is held now; volatile."""
        records: list[HeldRecord] = []
        try:
            records.extend(self._records())
        except OSError:
            if not records:
                raise
        num_tokens = self._served(records)
        is_cut = bool(records and self._wanted[0] and num_tokens < records[-1].tokens.stop)
        return Served(num_tokens, is_cut)

    def _records(self) -> Iterator[HeldRecord]:
        """The longest records that hold the layers that see all tokens, from the first on."""
        size = self._chain.tokens_per_record
        for ordinal in Span(0, self._chain.num_tokens).blocks(size):
            found = self._longest(ordinal)
            if found is None:
                return
            yield found
            if len(found.tokens) < size:
                return

    def _longest(self, ordinal: int) -> HeldRecord | None:
        names_of, full = self._index.names_of, self._wanted[0]
        for record, key in self._chain.candidates(ordinal):
            # Where all layers have windows, nobody needs a record that no window reaches.
            if not full or names_of(key, full):
                lacking = (window for window, boxes in self._wanted.items() if window and not names_of(key, boxes))
                return HeldRecord(record, frozenset(lacking))
        return None

    def _served(self, records: Sequence[HeldRecord]) -> int:
        num_ends = 0
        for ordinal in reversed(range(len(records))):
            if self._suffices(records, ordinal, records[ordinal].tokens.stop):
                return records[ordinal].tokens.stop
            if records[ordinal].lacking and num_ends < MAX_ENDS:
                num_ends += 1
                end = self._complete(ordinal)
                whole = end and [*records[:ordinal], HeldRecord(end, frozenset())]
                if end and whole and self._suffices(whole, ordinal, end.stop):
                    return end.stop
        return 0

    def _complete(self, ordinal: int) -> Span | None:
        """The longest record there that lacks nothing."""
        boxes = tuple(box for boxes in self._wanted.values() for box in boxes)
        return next(
            (record for record, key in self._chain.candidates(ordinal) if self._index.names_of(key, boxes)), None
        )

    def _suffices(self, records: Sequence[HeldRecord], last: int, stop: int) -> bool:
        """Whether the token at `stop`, right behind record `last`, finds all that it sees."""
        before, reach = Span(0, stop), max(self._state.windows, default=0) + self._state.tokens_per_allocation
        for record in reversed(records[: last + 1]):
            if stop - record.tokens.stop > reach:
                break
            if any(kept_for_next(before, window, self._state) & record.tokens for window in record.lacking):
                return False
        return True
