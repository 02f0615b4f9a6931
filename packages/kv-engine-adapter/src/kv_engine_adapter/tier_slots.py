"""Host slots: which hold what, found by tokens, given to what is to be kept.

In:  tokens with their scope and wishes.
Out: `Found`, volatile and checked in constant time; `Kept`, slots that are held until they are released.
Law: what was not published is never found. What was found before a restart is not there any more, and what was kept
     before it is released to nobody.

`KVCacheManager` governs the slots as its primary level, so matching, priorities, durations and eviction are its own.
With one level its block ids are slots.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Final, NamedTuple

from kv_core.config import ManagerConfig, WindowConfig
from kv_core.ids import BlockId, RequestId
from kv_core.keys import Scope
from kv_core.manager import KVCacheManager
from kv_core.pins import Pin
from kv_core.request import Request
from kv_core.retention import RetentionConfig
from kv_core.tiers import Place, Tier
from kv_engine_adapter.tier_events import BlockName, TierEvents
from kv_engine_adapter.tier_parts import Wanted, WindowParts
from kv_engine_adapter.tier_terms import TierTerms

_LOOKUP: Final = RequestId("lookup")


class Found(NamedTuple):
    """The first `num_tokens` of some tokens lie in these slots.

    They do as long as the last slot's generation stays, since none goes before what follows it, and nothing was lost.
    """

    num_tokens: int = 0
    slots: tuple[int, ...] = ()
    generation: int = 0
    num_losses: int = 0


class Kept(NamedTuple):
    """Slots for all blocks of some tokens; what was there already is shared with others.

    `names` are the engine's of its blocks, if anybody wants to hear of them.
    """

    name: RequestId
    tokens: Sequence[int]
    scope: Scope
    slots: tuple[int, ...]
    run: int
    names: Sequence[BlockName] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class HostSlots:
    """The slots of one engine."""

    def __init__(self, terms: TierTerms, clock: Callable[[], float], events: TierEvents | None = None) -> None:
        self._terms = terms
        self._clock = clock
        self._events = events
        self._is_told = events is not None
        self._names = count()
        self._run = 0
        self._num_losses = 0  # and restarts: what was found before one must be looked for again
        self._window = terms.max_tokens
        self._manager = self._new_manager()
        self.parts = self._new_parts()
        """What they hold of groups with windows."""
        self._kept: dict[RequestId, Pin | None] = {}
        self._doomed: set[int] = set()  # lost, and pinned

    def find(self, tokens: Sequence[int], scope: Scope) -> Found:
        """The longest prefix that is there and of use, a part of a block included."""
        found = self.held(tokens, scope)
        num_served = self.parts.served(found.num_tokens, found.slots)
        if num_served == found.num_tokens:
            return found
        slots = found.slots[: -(-num_served // self._terms.tokens_per_block)]
        return Found(num_served, slots, self._generation(slots[-1]) if slots else 0, found.num_losses)

    def held(self, tokens: Sequence[int], scope: Scope) -> Found:
        """The longest prefix of which there are slots, whatever they hold of groups with windows."""
        if not tokens:
            return Found(num_losses=self._num_losses)
        found = self._manager.lookup(Request(_LOOKUP, tokens, scope_within(scope, len(tokens))), self._window)
        slots = _slots(found.block_ids)
        return Found(found.num_tokens, slots, self._generation(slots[-1]) if slots else 0, self._num_losses)

    def is_there(self, found: Found) -> bool:
        """Whether all that was found still is; in constant time."""
        if found.num_losses != self._num_losses:
            return False
        last = found.slots[-1:]
        return not last or self._generation(last[0]) == found.generation

    def keep(
        self,
        tokens: Sequence[int],
        scope: Scope,
        retention: RetentionConfig | None,
        names: Sequence[BlockName] = (),
    ) -> Kept | None:
        """Hold slots for these tokens, those that have them already and others; `None` if too many are in use."""
        name = RequestId(f"kept {next(self._names)}")
        request = Request(name, tokens, scope_within(scope, len(tokens)), retention=retention)
        if self._manager.add(request) is None:
            return None
        self._tell()
        self._kept[name] = None
        return Kept(name, tokens, scope, _slots(self._manager.block_ids(name, self._window)), self._run, names)

    def touch(self, tokens: Sequence[int], scope: Scope, retention: RetentionConfig | None) -> None:
        """Make what is there of these tokens the latest used, with these wishes; but for the block of the last one."""
        num_before = (len(tokens) - 1) // self._terms.tokens_per_block * self._terms.tokens_per_block
        kept = self.keep(tokens[: num_before + 1], scope, retention) if num_before else None
        if kept is not None:
            self.release(kept)

    def pin(self, kept: Kept) -> None:
        """Its slots stay those named, to be read by others, until it is released.

        Without, what is published gives up slots whose content others have published meanwhile.
        """
        assert self._is_held(kept), "law: only what is held is pinned"
        self._kept[kept.name] = self._manager.pin(kept.name)

    def publish(self, kept: Kept, num_filled: int, brought: Wanted | None = None) -> None:
        """So many of its tokens are in its slots, and are found from now on; the slots stay held.

        `brought` is what was copied into them, if the model has windows.
        """
        if self._is_held(kept) and num_filled:
            self._manager.publish(kept.name, num_filled, partial=True)
            self._note(kept, num_filled, brought)
            self._tell(kept.names)

    def release(self, kept: Kept, num_filled: int = 0, brought: Wanted | None = None) -> None:
        """Hold it no longer; so many of its tokens are found from now on, beside what was published before."""
        if self._is_held(kept):
            pin = self._kept.pop(kept.name)
            self._manager.release(kept.name, publish=num_filled > 0, num_filled=num_filled or None)
            if num_filled:
                self._note(kept, num_filled, brought)
            self._tell(kept.names)
            if pin is not None:
                self._manager.unpin(pin)
                self.lose(self._doomed.intersection(kept.slots))

    def lose(self, slots: Collection[int]) -> None:
        """The bytes in these slots are not what was written: they, and what follows them, are not found any more.

        Pinned ones are found until they are released, since nobody else may have their slots before.
        """
        if not slots:
            return
        self._num_losses += 1
        pins = [pin for pin in self._kept.values() if pin is not None]
        pinned = {int(block_id) for pin in pins for block_id in pin.block_ids[self._window]}.intersection(slots)
        self._doomed = self._doomed.difference(slots) | pinned
        lost = [Place(self._window, Tier.DEVICE, slot) for slot in sorted(set(slots) - pinned)]
        for name in self._manager.lost(lost):
            pin = self._kept.pop(name)
            assert pin is None, "law: a block that follows a pinned one is pinned, or is in no table with it"
        self._tell()

    def silence(self) -> None:
        """Tell nobody of what is published from now on until a restart."""
        self._is_told = False

    def restart(self) -> None:
        """Begin anew with empty slots; nobody may still write or read them."""
        self._run += 1
        self._is_told = self._events is not None
        self._num_losses += 1
        self._kept.clear()
        self._doomed.clear()
        self._manager = self._new_manager()
        self.parts = self._new_parts()

    def refresh(self) -> None:
        """Let priorities fall back whose time is over."""
        self._manager.refresh()
        self._tell()

    @property
    def num_held(self) -> int:
        return self._terms.num_slots - self._manager.num_free()

    def check(self) -> None:
        """Prove all invariants; AssertionError names the broken law."""
        self._manager.check()
        assert self._kept or not self.num_held, "law: slots are held for what is kept"

    def _tell(self, names: Sequence[BlockName] = ()) -> None:
        """Pass on what the last call of the manager changed."""
        if self._events is None:
            return
        self._manager.flush_events()
        changed = self._manager.take_events()
        if self._is_told:
            self._events.host_changed(changed, names)

    def _note(self, kept: Kept, num_filled: int, brought: Wanted | None) -> None:
        """Parts lie where they were brought to, if that is what is found: equal content may have been there before."""
        if brought is None or not self._terms.windowed:
            return
        found = set(self.held(kept.tokens[:num_filled], kept.scope).slots)
        parts = self.parts.brought(kept.slots, brought, num_filled)
        self.parts.filled({slot: groups for slot, groups in parts.items() if slot in found})

    def _generation(self, slot: int) -> int:
        return self._manager.generation(self._window, BlockId(slot))

    def _new_parts(self) -> WindowParts:
        return WindowParts(self._terms, self._generation)

    def _is_held(self, kept: Kept) -> bool:
        return kept.run == self._run and kept.name in self._kept

    def _new_manager(self) -> KVCacheManager:
        # Why without partial reuse: the tail of a request is copied from the device anyhow, not from a like block.
        config = ManagerConfig(
            tokens_per_block=self._terms.tokens_per_block,
            windows=(WindowConfig(self._window, self._terms.num_slots),),
            max_sequence_length=self._window,
            partial_reuse=False,
            # More than one call can tell: of each slot that it is empty now, or filled, or wanted for longer.
            event_buffer_size=0 if self._events is None else 4 * self._terms.num_slots + 64,
        )
        return KVCacheManager(config, clock_ms=lambda: int(1000 * self._clock()))


def scope_within(scope: Scope, num_tokens: int) -> Scope:
    """Items that begin behind the last token have no part in a shorter prefix."""
    if not scope.extras:
        return scope
    return Scope(scope.lora, scope.salt, tuple(item for item in scope.extras if item[1] < num_tokens))


def _slots(block_ids: Sequence[BlockId | None]) -> tuple[int, ...]:
    assert None not in block_ids, "law: a window that does not slide has no holes"
    return tuple(int(block_id) for block_id in block_ids if block_id is not None)
