"""Why two instances cannot exchange KV cache.

In:  two CacheStates.
Out: every reason at once, each with both values; none means that any part of one cache may be copied into the other.
Law: symmetric but for the exchange of `ours` and `theirs`. How the model is cut over ranks is never a reason; block
size and block order are none either as long as single tokens can be addressed. Elements may differ only where both
sides ask for their conversion (`elements`). Transfer spec 2.4, 2.6, 2.8; defects A1, A3, A4, A11.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from kv_transfer.plan import elements
from kv_transfer.plan.cache_state import CacheState

MUST_MATCH: Final = (
    "fingerprint",
    "attention",
    "head_size",
    "num_planes",
    "num_layers",
    "num_kv_heads",
    "windows",
    "chunked",
)


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One field in which two caches differ and must not."""

    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.field} differs: ours={self.ours}, theirs={self.theirs}"


def reasons(ours: CacheState, theirs: CacheState) -> tuple[Reason, ...]:
    """All reasons not to exchange, in a fixed order; empty if the two are compatible."""
    pairs = [(field, getattr(ours, field), getattr(theirs, field)) for field in MUST_MATCH]
    pairs.append(("tile", ours.layout.tile, theirs.layout.tile))
    if not (ours.layout.is_plain and theirs.layout.is_plain):
        pairs.append(("tokens_per_block", ours.tokens_per_block, theirs.tokens_per_block))
    found = [Reason(field, str(mine), str(other)) for field, mine, other in pairs if mine != other]
    return (*found, *_of_elements(ours, theirs))


def _of_elements(ours: CacheState, theirs: CacheState) -> Iterator[Reason]:
    objections = list(elements.objections(ours, theirs))
    yield from (Reason(*objection) for objection in objections)
    if not objections and is_converted(ours, theirs) and not (ours.layout.is_plain and theirs.layout.is_plain):
        # What an opaque tile holds where, only its own element type tells.
        yield Reason("dtype (in opaque tiles)", ours.dtype, theirs.dtype)


def is_converted(ours: CacheState, theirs: CacheState) -> bool:
    """Whether elements change between these two caches, which are compatible. Never on the direct path."""
    return elements.differ(ours, theirs)
