"""The KV cache manager: every block of every window, who holds it and what it holds.

In:  requests, token counts, releases, in the order of an engine's steps.
Out: block ids, copy orders, events, statistics.
Law: a call that is refused or raises changes nothing. One thread calls (the engine's); only `take_events` may be called
     from others (core spec D57). What is cached is found again only for equal tokens, extra ids, items and scope.

One step of an engine (core spec 8.1):

    refresh()                            expired priorities fall back
    add / add_all                        requests that start; None means "not now"
    grow                                 requests that decode; False means "not now"
    take_copies()                        orders to execute before the model runs
    ... the model runs ...
    publish                              what the model filled becomes findable
    rewind                               rejected drafts
    release                              requests that end
    flush_events()
"""

import time
from collections import abc

from kv_core import inspection, losing, pins, victims
from kv_core.config import ManagerConfig
from kv_core.dry_run import DryRun
from kv_core.errors import CallerError
from kv_core.events import Event
from kv_core.ids import BlockId, BlockOrdinal, RequestId
from kv_core.keys import BlockKey
from kv_core.pins import Pin
from kv_core.registry import Registry
from kv_core.request import Admission, BlockView, ExternalCache, Lookup, MissingPrefix, Probe, Request
from kv_core.sequence import Table
from kv_core.spans import ceil_div
from kv_core.stats import ManagerStats
from kv_core.tiers import CopyOrder, Place, Tier
from kv_core.window import Window


class KVCacheManager:
    """All windows of one cache. `clock_ms` gives monotonic milliseconds; tests turn it by hand."""

    def __init__(
        self,
        config: ManagerConfig,
        *,
        clock_ms: abc.Callable[[], int] | None = None,
        external: ExternalCache | None = None,
    ) -> None:
        self.config = config
        self._registry = Registry(config, clock_ms or _monotonic_ms, external)
        self._events = self._registry.events
        self._pins: dict[Pin, None] = {}
        if self._events is not None:
            for window in config.windows:
                self._events.created(window.window, window.num_blocks)

    # Requests.

    def add(self, request: Request, *, beam_width: int = 1) -> Admission | None:
        """Admit a request: match its prompt in all windows, claim what is found, take blocks for the rest.

        None if there are not enough free blocks now. Raises CapacityError if the request exceeds `max_sequence_length`
        or more blocks than a window has, CallerError for an id that is present or a beam width out of range.
        """
        self._registry.check_capacity(request, beam_width)
        return self._registry.admit(self._registry.begin(request, beam_width))

    def add_all(self, requests: abc.Sequence[Request]) -> list[Admission | None]:
        """Admit several requests of one step, in order; what any of them finds is kept from the others' victims (D36).

        Each is admitted or not as by `add`. Raises what `add` raises for any of them, before the first is admitted.
        """
        names = {request.request_id for request in requests}
        if len(names) < len(requests):
            raise CallerError(f"a request is there twice: {[request.request_id for request in requests]}")
        for request in requests:
            self._registry.check_capacity(request, 1)
        return self._registry.admit_all(list(requests))

    def probe(self, request: Request, *, beam_width: int = 1) -> Probe:
        """What `add` would find and cost now; raises what `add` raises."""
        return self._registry.probe(request, beam_width)

    def grow(self, request_id: RequestId, num_tokens: int = 1) -> bool:
        """Make room for `num_tokens` more tokens; a sliding window lets go of blocks that it no longer reads.

        False if there are not enough free blocks now. CapacityError beyond `max_sequence_length`.
        """
        sequence = self._registry.find(request_id)
        length = sequence.num_tokens + num_tokens
        if num_tokens > 0 and length <= sequence.room:
            sequence.num_tokens = length
            return True
        return self._registry.grow(sequence, num_tokens)

    def extend(self, request_id: RequestId, tokens: abc.Sequence[int]) -> None:
        """Tell which tokens follow those told so far (generated tokens; extra ids are 0). Room is made by `grow`."""
        log = self._registry.find(request_id).log
        if log is not None:
            log.extend(tokens)

    def rewind(self, request_id: RequestId, num_tokens: int) -> bool:
        """Take back the last `num_tokens` tokens: rejected drafts. Blocks without tokens become free first in line.

        Told tokens beyond the new length are forgotten. If the block that decoding goes on in is published and others
        may read it, it is replaced by a private copy; False if there is no block for that now. CallerError with beams,
        beyond the start, or if a sliding window let go of what it would need again (keep `max_rewind`, core spec D7).
        """
        return self._registry.rewind(self._registry.find(request_id), num_tokens)

    def publish(self, request_id: RequestId, num_filled: int | None = None, *, partial: bool = False) -> int:
        """Make full blocks of the first `num_filled` tokens findable (default: all told tokens but the last, D64).

        With `partial` also the last block if it is not full. Where equal content is in the tree already, the request
        takes over the blocks of the tree and its own become free (read `block_ids` again; core spec D30). Costs what is
        new, not what was published before. Returns the number of blocks, over all windows, that entered the tree.
        With beams only the blocks that all beams share (D61). Dummies and requests without tokens publish nothing.
        """
        return self._registry.publish(self._registry.find(request_id), num_filled, partial=partial)

    def release(
        self, request_id: RequestId, *, publish: bool = True, num_filled: int | None = None, pin: bool = False
    ) -> Pin | None:
        """End a request: publish all it filled (partial last block included), give its blocks up, last block first.

        With `pin` the blocks stay held and the Pin is returned.
        """
        sequence = self._registry.find(request_id)
        if publish:
            self._registry.publish(sequence, num_filled, partial=True)
        pinned = self.pin(request_id) if pin else None
        for window, table in self._registry.pairs(sequence):
            window.release_table(sequence, table)
        del self._registry.sequences[request_id]
        return pinned

    def pin(self, request_id: RequestId) -> Pin:
        """Keep the blocks that the request has now, whatever becomes of it."""
        pairs = self._registry.pairs(self._registry.find(request_id))
        pin = Pin([pins.pin_table(window, table) for window, table in pairs])
        self._pins[pin] = None
        return pin

    def unpin(self, pin: Pin, blocks: abc.Mapping[int, abc.Collection[BlockId]] | None = None) -> None:
        """Give a pin's blocks up: all, or those that `blocks` names by window; the others stay pinned.

        A window that does not slide keeps a block until those of the pin that follow it are given up too. CallerError
        if the pin was given back before, or does not hold what is named.
        """
        if pin not in self._pins:
            raise CallerError("this pin was given back before, or another manager gave it")
        for size, block_ids in (blocks or {}).items():
            pin.check_left(size, block_ids)
        for size, block_ids in (pin.block_ids if blocks is None else blocks).items():
            pin.give_up(self._registry.window(size), block_ids)
        if not pin.held:
            del self._pins[pin]

    def make_writable(self, request_id: RequestId, ordinal: BlockOrdinal) -> bool:
        """Give every beam its own copies of the blocks from `ordinal` on that others may read (core spec 8.7, D49).

        False if there are not enough free blocks now. CallerError for a block that the request does not have.
        """
        return self._registry.make_writable(self._registry.find(request_id), ordinal)

    # Questions.

    def num_tokens(self, request_id: RequestId) -> int:
        """Tokens that the request has room for."""
        return self._registry.find(request_id).num_tokens

    def beam_width(self, request_id: RequestId) -> int:
        """Beams of the request."""
        return self._registry.find(request_id).beam_width

    def block_ids(self, request_id: RequestId, window: int, beam: int = 0) -> list[BlockId | None]:
        """The request's table, a copy. None where a sliding window holds no block any more."""
        return self._table(request_id, window, beam)[1].beam_ids(beam)

    def slots(self, request_id: RequestId, window: int, beam: int = 0) -> list[int | None]:
        """The same as device slots, which is what pools are indexed with; ids and slots differ once tiers are used."""
        ours, table = self._table(request_id, window, beam)
        place = ours.pool.place
        return [None if block_id is None else place(block_id).slot for block_id in table.beam_ids(beam)]

    def generation(self, window: int, block_id: BlockId) -> int:
        """How often the block's content has been given up since somebody first asked. Equal: still the same content."""
        return self._registry.window(window).pool.generation(block_id)

    def num_free(self, window: int | None = None, tier: Tier = Tier.DEVICE) -> int:
        """Blocks that can be taken: empty ones and cached ones that nobody holds. Without window: the sum."""
        windows = self._registry.windows if window is None else [self._registry.window(window)]
        return sum(ours.queues[tier].num_free for ours in windows)

    def block_keys(self, request_id: RequestId) -> list[BlockKey]:
        """256-bit keys of the full blocks of all told tokens; made once and then extended."""
        sequence = self._registry.find(request_id)
        log, size = sequence.log, self.config.tokens_per_block
        return [] if log is None else list(self._registry.keys(sequence, log, len(log) // size))

    def lookup(self, request: Request, window: int) -> Lookup:
        """The cached blocks of all `request.tokens`: whole blocks, only the last one in part (core spec D9)."""
        ours = self._registry.window(window)
        sequence = self._registry.begin(request)
        root = sequence.tables[self._registry.sizes[window]].root
        found = Lookup(0, ()) if sequence.log is None else inspection.lookup(ours, root, sequence.log)
        self._registry.forget(sequence)
        return found

    def missing_prefix(self, request: Request) -> MissingPrefix | None:
        """The prompt up to its first full block that is missing in some window; None if there is none (D43)."""
        return self._registry.missing_prefix(request)

    def dry_run(self) -> DryRun:
        """Begin to suppose that requests end."""
        return DryRun(self._registry.windows, self._registry.find)

    def stats(self) -> ManagerStats:
        """Counters now."""
        ours = self._registry
        windows = tuple(inspection.window_stats(window) for window in ours.windows)
        return ManagerStats(windows, ours.num_input, ours.num_cached, ours.num_external)

    # Time, tiers, events.

    def refresh(self) -> int:
        """Let priorities fall back whose time is over; the number of blocks concerned."""
        return sum(window.refresh() for window in self._registry.windows)

    def take_copies(self) -> tuple[CopyOrder, ...]:
        """Copies ordered since the last call; execute them before the model runs."""
        return self._registry.copies.take()

    def copies_done(self, below: int) -> None:
        """All copies with an id less than `below` have ended."""
        self._registry.copies.done(below)

    def lost(self, places: abc.Iterable[Place]) -> tuple[RequestId, ...]:
        """The bytes at these places are lost: copies to them failed. What was to be there is not found any more.

        Requests that hold such a block end, unpublished, and are returned in the order of their admission: admit them
        again. To be called after `copies_done` and before the model runs. CallerError if a pin holds such a block.
        """
        lost: dict[int, list[BlockId]] = {}
        for place in places:
            block_id = self._registry.window(place.window).pool.id_at(place)
            lost.setdefault(place.window, []).append(BlockId(block_id))
        for pin in self._pins:
            if any(not set(ids).isdisjoint(pin.block_ids[window]) for window, ids in lost.items()):
                raise CallerError(f"a pin holds blocks that are lost; unpin them first: {lost}")
        victims = tuple(request_id for request_id in self._registry.sequences if self._holds(request_id, lost))
        for request_id in victims:
            self.release(request_id, publish=False)
        for window, block_ids in lost.items():
            losing.lose(self._registry.window(window), block_ids)
        return victims

    def _holds(self, request_id: RequestId, blocks: abc.Mapping[int, abc.Sequence[BlockId]]) -> bool:
        """Whether the request's tables list any of these blocks."""
        tables = (self._table(request_id, window, 0)[1] for window in blocks)
        return any(
            not set(ids).isdisjoint(table.private_ids(table.start, table.stop))
            for ids, table in zip(blocks.values(), tables, strict=True)
        )

    def offload(self, window: int, block_id: BlockId) -> bool:
        """Move one block a tier down. False if it is held, not in the tree, or has no room there, or if blocks of its
        tier depend on it (core spec D6).
        """
        ours = self._registry.window(window)
        ours.pool.place(block_id)
        found = inspection.find(ours, block_id)
        return found is not None and victims.offload(ours, inspection.isolate(ours, *found))

    def onboard(self, window: int, block_id: BlockId) -> bool:
        """Bring one block to the device. False if there is no room, or if the block before it is not there yet."""
        ours = self._registry.window(window)
        if ours.pool.place(block_id).tier == Tier.DEVICE:
            return True
        found = inspection.find(ours, block_id)
        return found is not None and victims.onboard(ours, inspection.isolate(ours, *found))

    def flush_events(self) -> None:
        """Hand the events of this step to the readers."""
        if self._events is not None:
            self._events.flush()

    def take_events(self, timeout_s: float | None = 0.0) -> list[Event]:
        """All events flushed since the last call; waits up to `timeout_s` (None: until some come or `close`)."""
        return [] if self._events is None else self._events.take(timeout_s)

    def snapshot(self) -> list[Event]:
        """`Stored` events (all with id 0) that tell the whole tree, for a reader after a `Reset`; needs events on."""
        return [event for window in self._registry.windows for event in inspection.snapshot(window)]

    def close(self) -> None:
        """Wake all readers of events; no more will come."""
        if self._events is not None:
            self._events.close()

    # Inspection: as costly as the tree is large.

    def inspect(self, window: int, block_id: BlockId) -> BlockView:
        """One block as it is now."""
        ours = self._registry.window(window)
        return inspection.inspect(ours, block_id, self._registry.tables(ours))

    def set_priority(self, window: int, block_id: BlockId, priority: int) -> bool:
        """Write the priority of a block; False if it is empty. Its place among the free ones is another once it was
        held and released again.
        """
        ours = self._registry.window(window)
        return inspection.set_priority(ours, block_id, priority, self._registry.tables(ours))

    def check(self) -> None:
        """Prove all invariants; AssertionError names the broken law. Linear in everything."""
        held = [held for pin in self._pins for held in pin.held]
        for window in self._registry.windows:
            ours = [one for one in held if one.window is window]
            inspection.check_window(window, list(self._registry.tables(window)), ours)
        for sequence in self._registry.sequences.values():
            assert sequence.room == self._registry.room(sequence), "law: room is up to date"
            for window, table in self._registry.pairs(sequence):
                num_blocks = ceil_div(sequence.num_tokens, window.tokens_per_block)
                assert table.stop == num_blocks, "law: a table has the blocks of its tokens"

    def _table(self, request_id: RequestId, window: int, beam: int) -> tuple[Window, Table]:
        sequence, ours = self._registry.find(request_id), self._registry.window(window)
        if not 0 <= beam < sequence.beam_width:
            raise CallerError(f"no such beam: ours={sequence.beam_width}, theirs={beam}")
        return ours, sequence.tables[self._registry.sizes[window]]


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
