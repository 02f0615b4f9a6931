"""How much of an offered prompt is computed, and whether its blocks still are its own.

In:  what the engine says: so many tokens are computed, more of them in its first layers, and they lie in these blocks.
Out: HeldGrowth for the reactor's thread, GrowingBook for the engine's, and the Standing that both share.
Law: progress never goes back, and an entry of a table once given never changes. A Standing is ended in the engine's own
     thread before the engine uses the blocks for anything else: so whoever has read blocks, and then finds it whole,
     has read what was computed. After a failed call all is as before.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kv_core.errors import CallerError
from kv_core.ids import RequestId
from kv_core.spans import Span
from kv_transfer.orders import BlockTables, Offer, Tables
from kv_transfer.plan.frontier import EVERY_LAYER, Ahead, Frontier

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class Standing:
    """Of one offer; written once, by the engine's thread, and read by any."""

    ended: str = ""
    """Why the engine has taken the blocks back; empty while it has not."""


Filled: TypeAlias = "torch.cuda.Event | None"
"""After which event what is computed lies in its blocks (CUDA)."""


class Step(NamedTuple):
    """From here on so much is computed, once `filled` has happened (CUDA)."""

    computed: Frontier
    filled: "torch.cuda.Event | None"


@dataclass(slots=True, eq=False)
class HeldGrowth:
    """What the sessions of one offer may read; of the reactor's thread."""

    tables: BlockTables
    """Of a growing offer the blocks known so far, for a prompt of `num_tokens`."""
    steps: list[Step]
    is_growing: bool = False
    standing: Standing = field(default_factory=Standing)

    @property
    def computed(self) -> Frontier:
        """What may be read."""
        return self.steps[-1].computed

    @property
    def num_computed(self) -> int:
        """Tokens that may be read in all layers: [0, num_computed)."""
        return self.computed.num_computed

    def advance(self, computed: Frontier, by_group: Tables, filled: "torch.cuda.Event | None") -> None:
        """So much is computed by now."""
        self.tables = replace(self.tables, by_group=by_group)
        self.steps.append(Step(computed, filled))

    def filled(self, tokens: Span, layers: Span = EVERY_LAYER) -> "torch.cuda.Event | None":
        """After which event these are in their blocks: the first that says so."""
        first = bisect_left(self.steps, True, key=lambda step: step.computed.covers(tokens, layers))
        assert first < len(self.steps), "law: only what is computed is read"
        return self.steps[first].filled

    def lack(self, tokens: Span, layers: Span = EVERY_LAYER) -> str:
        """That not all of this is computed, in both values; empty if it is."""
        if self.computed.covers(tokens, layers):
            return ""
        of_layers = "" if layers == EVERY_LAYER else f" of layers {layers}"
        return f"the prompt is not computed so far: computed={self.computed}, wanted={tokens}{of_layers}"


@dataclass(slots=True, eq=False)
class _Growing:
    """As the engine has told it."""

    offer: Offer
    num_computed: int
    by_group: Tables
    standing: Standing
    ahead: Ahead | None = None

    @property
    def computed(self) -> Frontier:
        return Frontier(self.num_computed, self.ahead)


class GrowingBook:
    """Offers that grow, until they are complete or abandoned; of the engine's thread."""

    def __init__(self, layers: Span = EVERY_LAYER) -> None:
        """`layers` are the rank's own."""
        self._layers = layers
        self._growing: dict[RequestId, _Growing] = {}

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._growing

    def __len__(self) -> int:
        return len(self._growing)

    def open(self, offer: Offer) -> Standing:
        """One more, which may be complete already."""
        standing = Standing()
        if offer.num_computed is not None:
            told = offer.num_computed, offer.tables.by_group
            self._growing[offer.request_id] = _Growing(offer, *told, standing)
        return standing

    def advance(
        self, request_id: RequestId, num_computed: int, by_group: Tables, ahead: Ahead | None = None
    ) -> Frontier:
        """CallerError, with both values, if progress goes back or beyond the prompt, or a table's entry changes."""
        known, told = self._known(request_id), Frontier(num_computed, ahead)
        if not known.num_computed <= num_computed <= known.offer.num_tokens:
            bounds = f"told before={known.num_computed}, prompt={known.offer.num_tokens}, told now={num_computed}"
            raise CallerError(f"progress goes back, or beyond the prompt: request={request_id}, {bounds}")
        self._check_ahead(known, told)
        _check_extended(request_id, known.by_group, by_group)
        known.num_computed, known.ahead, known.by_group = num_computed, ahead, by_group
        return told

    def complete(self, request_id: RequestId) -> None:
        """CallerError, with both values, unless all is computed."""
        known = self._known(request_id)
        if known.num_computed != known.offer.num_tokens:
            both = f"computed={known.num_computed}, prompt={known.offer.num_tokens}"
            raise CallerError(f"the prompt is not computed to its end: request={request_id}, {both}")
        del self._growing[request_id]

    def abandon(self, request_id: RequestId, reason: str) -> str:
        """Ends its standing at once; answers the reason with what was computed."""
        known = self._known(request_id)
        del self._growing[request_id]
        known.standing.ended = f"{reason}: computed={known.computed} of [0, {known.offer.num_tokens})"
        return known.standing.ended

    def length(self, request_id: RequestId) -> int:
        """Tokens of the prompt."""
        return self._known(request_id).offer.num_tokens

    def check(self) -> None:
        """Proves the invariants; for tests."""
        for request_id, known in self._growing.items():
            first, most, name = known.offer.num_computed, known.offer.num_tokens, known.offer.request_id
            assert name == request_id, f"law: an offer is kept under its request: {name}, {request_id}"
            assert not known.standing.ended, f"law: what grows stands: {request_id}, {known.standing.ended}"
            assert first is not None, f"law: what is computed when it is offered does not grow: {request_id}"
            assert first <= known.num_computed <= most, f"law: progress is of the prompt, and forward: {request_id}"
            for old, new in zip(known.offer.tables.by_group, known.by_group, strict=True):
                assert tuple(new[: len(old)]) == tuple(old), f"law: an entry once given never changes: {request_id}"

    def _check_ahead(self, known: _Growing, told: Frontier) -> None:
        name, ours, prompt = known.offer.request_id, self._layers, known.offer.num_tokens
        if (ahead := told.ahead) is not None:
            if not told.num_computed < ahead.token_stop <= prompt:
                bounds = f"computed={told.num_computed}, prompt={prompt}, ahead to={ahead.token_stop}"
                raise CallerError(f"what is ahead is computed already, or beyond the prompt: request={name}, {bounds}")
            if not ours.start < ahead.layer_stop <= ours.stop:
                both = f"ours={ours}, ahead to={ahead.layer_stop}"
                raise CallerError(f"layers that are ahead are not of this rank: request={name}, {both}")
        if not told.includes(known.computed):
            both = f"told before={known.computed}, told now={told}"
            raise CallerError(f"what was computed ahead is not any more: request={name}, {both}")

    def _known(self, request_id: RequestId) -> _Growing:
        if request_id not in self._growing:
            raise CallerError(f"no offer of this request is growing: request={request_id}")
        return self._growing[request_id]


def _check_extended(request_id: RequestId, before: Tables, now: Tables) -> None:
    if len(before) != len(now):
        raise CallerError(f"the number of tables changed: request={request_id}, before={len(before)}, now={len(now)}")
    for group, (old, new) in enumerate(zip(before, now, strict=True)):
        if len(new) < len(old):
            both = f"blocks before={len(old)}, now={len(new)}"
            raise CallerError(f"a block table shrank while its offer grows: request={request_id}, {both}")
        if (changed := _first_change(old, new)) is not None:
            where = f"group={group}, entry={changed}, before={old[changed]}, now={new[changed]}"
            raise CallerError(f"a block table changed while its offer grows: request={request_id}, {where}")


def _first_change(old: Sequence[int], new: Sequence[int]) -> int | None:
    if tuple(new[: len(old)]) == tuple(old):
        return None
    return next(entry for entry, (one, other) in enumerate(zip(old, new, strict=False)) if one != other)
