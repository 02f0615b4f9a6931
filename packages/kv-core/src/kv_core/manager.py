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

from collections.abc import Callable, Sequence

from kv_core.config import ManagerConfig
from kv_core.events import Event
from kv_core.ids import BlockId, BlockOrdinal, RequestId
from kv_core.keys import BlockKey
from kv_core.request import Admission, BlockView, ExternalCache, Lookup, MissingPrefix, Request
from kv_core.stats import ManagerStats
from kv_core.tiers import CopyOrder, Tier


class Pin:
    """Blocks kept beyond their request, until `unpin`. Opaque; it belongs to the manager that gave it.

    `block_ids` lists the pinned blocks of each window.
    """

    block_ids: dict[int, tuple[BlockId, ...]]


class DryRun:
    """What would be free if some requests ended, without ending them (core spec 10.1)."""

    def release(self, request_id: RequestId) -> None:
        """Suppose that this request ends. CallerError if unknown or already supposed to end."""
        raise NotImplementedError

    def num_free(self, window: int) -> int:
        """Free device blocks of the window then."""
        raise NotImplementedError


class KVCacheManager:
    """All windows of one cache. `clock_ms` gives monotonic milliseconds; tests turn it by hand."""

    def __init__(
        self, config: ManagerConfig, *, clock_ms: Callable[[], int] | None = None, external: ExternalCache | None = None
    ) -> None:
        raise NotImplementedError

    # Requests.

    def add(self, request: Request, *, beam_width: int = 1) -> Admission | None:
        """Admit a request: match its prompt in all windows, claim what is found, take blocks for the rest.

        None if there are not enough free blocks now. Raises CapacityError if the request exceeds `max_sequence_length`
        or more blocks than a window has, CallerError for an id that is present or a beam width out of range.
        """
        raise NotImplementedError

    def add_all(self, requests: Sequence[Request]) -> list[Admission | None]:
        """Admit several requests of one step: what any of them finds is claimed before blocks are taken (D36)."""
        raise NotImplementedError

    def grow(self, request_id: RequestId, num_tokens: int = 1) -> bool:
        """Make room for `num_tokens` more tokens; a sliding window lets go of blocks that it no longer reads.

        False if there are not enough free blocks now. CapacityError beyond `max_sequence_length`.
        """
        raise NotImplementedError

    def extend(self, request_id: RequestId, tokens: Sequence[int]) -> None:
        """Tell which tokens follow those told so far (generated tokens; extra ids are 0). Room is made by `grow`."""
        raise NotImplementedError

    def rewind(self, request_id: RequestId, num_tokens: int) -> None:
        """Take back the last `num_tokens` tokens: rejected drafts. Blocks without tokens become free first in line.

        Told tokens beyond the new length are forgotten. CallerError with beams, beyond the start, or if a sliding
        window has let go of what it would need again (keep `max_rewind`, core spec D7). If the last block is published,
        it is replaced by a private copy, since decoding will write to it.
        """
        raise NotImplementedError

    def publish(self, request_id: RequestId, num_filled: int | None = None, *, partial: bool = False) -> int:
        """Make full blocks of the first `num_filled` tokens findable (default: all told tokens but the last, D64).

        With `partial` also the last block if it is not full. Where equal content is in the tree already, the request
        takes over the blocks of the tree and its own become free (read `block_ids` again; core spec D30). Costs what is
        new, not what was published before. Returns the number of blocks, over all windows, that entered the tree.
        With beams only the blocks that all beams share (D61). Dummies and requests without tokens publish nothing.
        """
        raise NotImplementedError

    def release(
        self,
        request_id: RequestId,
        *,
        publish: bool = True,
        num_filled: int | None = None,
        pin: bool = False,
    ) -> Pin | None:
        """End a request: publish all it filled (partial last block included), give its blocks up, last block first.

        With `pin` the blocks stay held and the Pin is returned.
        """
        raise NotImplementedError

    def pin(self, request_id: RequestId) -> Pin:
        """Keep the blocks that the request has now, whatever becomes of it."""
        raise NotImplementedError

    def unpin(self, pin: Pin) -> None:
        """Give a pin's blocks up. CallerError if that was done before."""
        raise NotImplementedError

    def make_writable(self, request_id: RequestId, ordinal: BlockOrdinal) -> bool:
        """Replace a block that others may read by a private copy in every window (core spec D49). False: not now."""
        raise NotImplementedError

    # Questions.

    @property
    def config(self) -> ManagerConfig:
        raise NotImplementedError

    def num_tokens(self, request_id: RequestId) -> int:
        """Tokens that the request has room for."""
        raise NotImplementedError

    def block_ids(self, request_id: RequestId, window: int, beam: int = 0) -> list[BlockId | None]:
        """The request's table, a copy. None where a sliding window holds no block any more."""
        raise NotImplementedError

    def slots(self, request_id: RequestId, window: int, beam: int = 0) -> list[int | None]:
        """The same as device slots, which is what pools are indexed with; ids and slots differ once tiers are used."""
        raise NotImplementedError

    def generation(self, window: int, block_id: BlockId) -> int:
        """How often the block's content has been given up. Equal: still the same content."""
        raise NotImplementedError

    def num_free(self, window: int | None = None, tier: Tier = Tier.DEVICE) -> int:
        """Blocks that can be taken: empty ones and cached ones that nobody holds. Without window: the sum."""
        raise NotImplementedError

    def block_keys(self, request_id: RequestId) -> list[BlockKey]:
        """256-bit keys of the full blocks of all told tokens; made once and then extended."""
        raise NotImplementedError

    def num_cached(self, request: Request) -> int:
        """Prompt tokens that `add` would find now. Volatile."""
        raise NotImplementedError

    def lookup(self, request: Request, window: int) -> Lookup:
        """The cached blocks of all `request.tokens`: whole blocks, only the last one in part (core spec D9)."""
        raise NotImplementedError

    def missing_prefix(self, request: Request) -> MissingPrefix | None:
        """The prompt up to its first full block that is missing in some window; None if there is none (D43)."""
        raise NotImplementedError

    def dry_run(self) -> DryRun:
        """Begin to suppose that requests end."""
        raise NotImplementedError

    def stats(self) -> ManagerStats:
        """Counters now."""
        raise NotImplementedError

    # Time, tiers, events.

    def refresh(self) -> int:
        """Let priorities fall back whose time is over; the number of blocks concerned."""
        raise NotImplementedError

    def take_copies(self) -> tuple[CopyOrder, ...]:
        """Copies ordered since the last call; execute them before the model runs."""
        raise NotImplementedError

    def copies_done(self, below: int) -> None:
        """All copies with an id less than `below` have ended."""
        raise NotImplementedError

    def offload(self, window: int, block_id: BlockId) -> bool:
        """Move one block a tier down; False if there is no room or blocks of its tier depend on it (core spec D6)."""
        raise NotImplementedError

    def onboard(self, window: int, block_id: BlockId) -> bool:
        """Bring one block back to the device; False if there is no room."""
        raise NotImplementedError

    def flush_events(self) -> None:
        """Hand the events of this step to the readers."""
        raise NotImplementedError

    def take_events(self, timeout_s: float | None = 0.0) -> list[Event]:
        """All events flushed since the last call; waits up to `timeout_s` (None: until some come or `close`)."""
        raise NotImplementedError

    def snapshot(self) -> list[Event]:
        """`Stored` events (without ids of their own) that tell the whole tree, for a reader after a `Reset`."""
        raise NotImplementedError

    def close(self) -> None:
        """Wake all readers of events; no more will come."""
        raise NotImplementedError

    # Inspection: as costly as the tree is large.

    def inspect(self, window: int, block_id: BlockId) -> BlockView:
        """One block as it is now."""
        raise NotImplementedError

    def set_priority(self, window: int, block_id: BlockId, priority: int) -> None:
        """Write a priority; the block's place among the free ones changes when it is next released."""
        raise NotImplementedError

    def check(self) -> None:
        """Prove all invariants; AssertionError names the broken law. Linear in everything."""
        raise NotImplementedError
