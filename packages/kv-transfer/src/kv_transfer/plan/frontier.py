"""How far a prompt is computed: tokens in all layers, and further tokens in the first of them.

In:  what an engine says of a prompt that it computes.
Out: a Frontier: which boxes of layers and tokens it covers, and whether another has come further.
Law: a box is covered if and only if every (layer, token) of it is computed.

           token 0     num_computed    token_stop
    layer 0  +--------------+--------------+
             |              |    ahead     |
    layer_   |   computed   +--------------+ layer_stop
    stop     |              |
             +--------------+
"""

from typing import Annotated, Final, NamedTuple

import msgspec

from kv_core.spans import Span
from kv_transfer.plan.cache_state import MAX_LAYERS
from kv_transfer.plan.plan import MAX_TOKENS

EVERY_LAYER: Final = Span(0, MAX_LAYERS)


class Ahead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the step that is being computed: global layers below `layer_stop` are, for tokens below `token_stop`."""

    layer_stop: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    token_stop: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]

    def includes(self, other: "Ahead") -> bool:
        """Whether all that the other says is said here as well."""
        return self.layer_stop >= other.layer_stop and self.token_stop >= other.token_stop


class Frontier(NamedTuple):
    """Tokens [0, num_computed) are computed in all layers; and what is ahead of them."""

    num_computed: int
    ahead: Ahead | None = None

    def covers(self, tokens: Span, layers: Span = EVERY_LAYER) -> bool:
        """Whether these tokens are computed in these layers."""
        if tokens.stop <= self.num_computed:
            return True
        ahead = self.ahead
        return ahead is not None and layers.stop <= ahead.layer_stop and tokens.stop <= ahead.token_stop

    def includes(self, other: "Frontier") -> bool:
        """Whether all that the other covers is covered here as well."""
        if other.num_computed > self.num_computed:
            return False
        if other.ahead is None or other.ahead.token_stop <= self.num_computed:
            return True
        return self.ahead is not None and self.ahead.includes(other.ahead)

    def with_(self, other: "Frontier") -> "Frontier":
        """What both have said, or less: of two steps that are being computed the later one alone."""
        num_computed = max(self.num_computed, other.num_computed)
        told = [each for each in (self.ahead, other.ahead) if each and each.token_stop > num_computed]
        return Frontier(num_computed, max(told, key=lambda each: (each.token_stop, each.layer_stop), default=None))

    @property
    def stop(self) -> int:
        """No token from this one on is computed in any layer."""
        return self.num_computed if self.ahead is None else max(self.num_computed, self.ahead.token_stop)

    def __str__(self) -> str:
        computed = f"[0, {self.num_computed})"
        if self.ahead is None:
            return computed
        return f"{computed} and of layers [0, {self.ahead.layer_stop}) [0, {self.ahead.token_stop})"


NOTHING: Final = Frontier(0)
