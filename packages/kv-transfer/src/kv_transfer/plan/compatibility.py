"""Why two instances cannot exchange KV cache.

In:  two CacheStates.
Out: every reason at once, each with both values; none means that any part of one cache may be copied into the other.
Law: symmetric but for the exchange of `ours` and `theirs`. How the model is cut over ranks is never a reason; block
size and block order are none either as long as single tokens can be addressed. Transfer spec 2.4, 2.6, 2.8; defects
A1, A3, A11.
"""

from typing import Final

import msgspec

from kv_transfer.plan.cache_state import CacheState

MUST_MATCH: Final = (
    "fingerprint",
    "attention",
    "dtype",
    "head_size",
    "num_planes",
    "num_layers",
    "num_kv_heads",
    "windows",
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
    return tuple(Reason(field, str(mine), str(other)) for field, mine, other in pairs if mine != other)
