"""The store of prefixes: what was computed once is read again, by any engine of this host, at any cut of the model.

In:  the chain of a prompt's keys, a span of its tokens, a rank's caches and block tables.
Out: how many tokens are held, were written, or were read.
Law: what is read is what was written for that prompt, or is not reported as read. Every file is verified before
     anything of its record is scattered. Whatever the disk does is a counted Miss and no exception; CallerError says
     that the caller broke a promise.

    store = PrefixStore(config, state)
    chain = store.chain(tokens, scope)
    num_held = store.lookup(chain)                                     volatile: others evict
    num_read = store.read(chain, Span(0, num_held), caches, tables)    compute from there on
    store.write(chain, Span(0, len(tokens)), caches, tables)
"""

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kv_core.errors import CallerError
from kv_core.keys import KEY_BYTES, BlockKey, Scope
from kv_core.retention import DEFAULT_PRIORITY, MAX_PRIORITY, MIN_PRIORITY
from kv_core.spans import Span
from kv_transfer.file_mover import FileMover, PlainFiles
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.pools import PagedCaches, dtype_name
from kv_transfer.prefix_store.boxes import Box, Boxes, cover
from kv_transfer.prefix_store.chain import PrefixChain
from kv_transfer.prefix_store.config import StoreConfig
from kv_transfer.prefix_store.header import Header
from kv_transfer.prefix_store.holdings import Holdings
from kv_transfer.prefix_store.index import covers
from kv_transfer.prefix_store.lookups import Lookup
from kv_transfer.prefix_store.misses import DAMAGE, Counts, Miss, Missed, why_of
from kv_transfer.prefix_store.names import Namespace, RecordName
from kv_transfer.prefix_store.record_files import RecordFiles
from kv_transfer.prefix_store.records import Records, Tables
from kv_transfer.prefix_store.windowed import filled_boxes, wanted_boxes

logger = logging.getLogger(__name__)

_ERRORS: Final = (OSError, Missed)


class Outcome(NamedTuple):
    """Of a write: tokens from the start of the span that are held now, bytes written, and why it ended before."""

    num_tokens: int
    num_bytes: int
    why: Miss | None = None


class Took(NamedTuple):
    """Seconds for each token of a rank: of writing it, and of reading and verifying it."""

    write_s: float
    read_s: float


class PrefixStore:
    """The records of one cache in one directory. Calls may come from several threads."""

    def __init__(
        self,
        config: StoreConfig,
        state: CacheState,
        *,
        mover: FileMover | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """A directory that cannot be used makes a store that holds nothing and says why in its counts and the log.

        CallerError for a cache that cannot be cut into records, or a directory that others may use.
        """
        _check_state(state)
        self._state = state
        self._counts = Counts()
        self._namespace = Namespace.of(state, config.hash_rule, config.tokens_per_record)
        self._tokens_per_record = config.tokens_per_record
        self._records = Records(state)
        self._clock = clock
        self._why_not = Miss.CLOSED
        self._holdings: Holdings | None = None
        try:
            self._holdings = Holdings(config, self._namespace, self._counts, clock)
            self._files = RecordFiles(self._holdings.shelf, mover or PlainFiles())
        except OSError as error:
            self._why_not = why_of(error)
            self._counts.add(f"open {self._why_not}")
            logger.warning("the store of prefixes is out of use: %s: %s", config.directory, error)

    @property
    def counts(self) -> Mapping[str, int]:
        """What has happened so far: misses as "read corrupt", the rest by names of their own."""
        return self._counts.snapshot()

    def chain(self, tokens: Sequence[int], scope: Scope = Scope()) -> PrefixChain:  # noqa: B008
        """The keys of a prompt, as this store cuts it."""
        return PrefixChain(tokens, scope, self._tokens_per_record)

    def lookup(self, chain: PrefixChain, box: Box | None = None) -> int:
        """How many of the prompt's first tokens are held, for all layers and heads or for those of a rank.

        Of layers with windows what the token behind them sees, by whole blocks.
        """
        self._check_chain(chain)
        if (holdings := self._holdings) is None:
            return self._missed("lookup", self._why_not)
        num_held, why = 0, Miss.ABSENT
        try:
            num_held, is_cut = Lookup(holdings.index, chain, self._state, self._model if box is None else box).served()
            why = Miss.HOLE if is_cut else Miss.ABSENT
        except OSError as error:
            why = why_of(error)
        if why is Miss.HOLE:
            self._counts.add("lookups_cut_by_windows")
        if num_held:
            self._counts.add("hit_tokens", num_held)
        elif chain.num_tokens:
            _, key = next(chain.candidates(0))
            self._missed("lookup", holdings.why_absent(key) if why is Miss.ABSENT else why)
        return num_held

    def read(self, chain: PrefixChain, tokens: Span, caches: PagedCaches, tables: Tables) -> int:
        """Fill our blocks with these tokens; how many were read, from the first on.

        Blocks of tokens beyond those are as they were. CallerError if the caches are not of this store's cache, or the
        tables have no block for a token.
        """
        self._check(chain, tokens, caches, tables)
        if (holdings := self._holdings) is None:
            return self._missed("read", self._why_not)
        at = tokens.start
        for ordinal in tokens.blocks(chain.tokens_per_record):
            wanted = Span(at, min(tokens.stop, (ordinal + 1) * chain.tokens_per_record))
            at = self._read_ordinal(holdings, chain, ordinal, wanted, caches, tables)
            if at < wanted.stop:
                break
        self._counts.add("read_tokens", at - tokens.start)
        return at - tokens.start

    def write(
        self,
        chain: PrefixChain,
        tokens: Span,
        caches: PagedCaches,
        tables: Tables,
        priority: int = DEFAULT_PRIORITY,
        expires_at: int = 0,
    ) -> Outcome:
        """Keep the rank's part of the records that begin in `tokens`; the last one may be partial.

        From `expires_at` on (seconds since 1970) the priority is the usual one. What is held with this priority or a
        higher one is not written again. CallerError as `read`.
        """
        self._check(chain, tokens, caches, tables)
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY or expires_at < 0:
            raise CallerError(f"priority outside of {MIN_PRIORITY}..{MAX_PRIORITY}: {priority}, until={expires_at}")
        num_tokens, num_bytes = 0, 0
        if not caches.planes:
            return Outcome(len(tokens), 0)
        for record, key in chain.records(tokens):
            name = RecordName(_box_of(caches), len(record), priority, expires_at)
            try:
                num_bytes += self._write_record(key, name, record, caches, tables)
            except _ERRORS as error:
                self._missed("write", why_of(error))
                if self._holdings is not None and self._holdings.is_restored(error):
                    self._counts.add("restored")
                return Outcome(num_tokens, num_bytes, why_of(error))
            num_tokens = record.stop - tokens.start
        return Outcome(num_tokens, num_bytes)

    def measure(self, caches: PagedCaches, clock: Callable[[], float]) -> "Took | None":
        """What a record of this rank costs, one being written, read from the disk and removed; None if that fails."""
        if (holdings := self._holdings) is None:
            return None
        key = BlockKey(os.urandom(KEY_BYTES))
        name = RecordName(_box_of(caches), self._tokens_per_record)
        header = Header.of(self._namespace, key, name.box, name.num_tokens, self._state)
        payload = torch.frombuffer(bytearray(os.urandom(header.payload_bytes)), dtype=torch.uint8)
        times = [clock()]
        try:
            self._files.write(header, name, payload)
            times.append(clock())
            holdings.shelf.cool(key, name, header.file_bytes)
            times.append(clock())
            self._files.read(header, name)
            times.append(clock())
        except _ERRORS as error:
            self._missed("measure", why_of(error))
            return None
        finally:
            holdings.shelf.discard(key, name)
        began, written, cooled, read = times
        return Took((written - began) / name.num_tokens, (read - cooled) / name.num_tokens)

    def close(self) -> None:
        """Records stay, what was being written goes. Idempotent."""
        if self._holdings is not None:
            self._holdings.close()
        self._holdings, self._why_not = None, Miss.CLOSED

    @property
    def _model(self) -> Box:
        return Box(Span(0, self._state.num_layers), Span(0, self._state.num_kv_heads))

    def _read_ordinal(
        self, holdings: Holdings, chain: PrefixChain, ordinal: int, wanted: Span, caches: PagedCaches, tables: Tables
    ) -> int:
        """Where reading ended: at the end of what is wanted, or before."""
        if not caches.planes:
            return wanted.stop
        failures: list[Miss] = []
        for record, key in chain.candidates(ordinal):
            if not (part := record & wanted):
                break
            if not (boxes := wanted_boxes(part, caches, tables)):
                return part.stop
            if (payloads := self._verified(holdings, key, record, boxes, failures)) is None:
                continue
            self._count_failures(failures)
            for held, parts, payload in payloads:
                for box in parts:
                    self._records.scatter(payload, held, record, box, part, caches, tables)
                self._counts.add("read_bytes", payload.numel())
            return part.stop
        self._count_failures(failures or [Miss.ABSENT])
        return wanted.start

    def _count_failures(self, failures: Sequence[Miss]) -> None:
        for why in failures:
            self._missed("read", why)

    def _verified(
        self, holdings: Holdings, key: BlockKey, record: Span, boxes: Boxes, failures: list[Miss]
    ) -> list[tuple[Box, tuple[Box, ...], Tensor]] | None:
        """Payloads that hold the boxes, with what to take from each; None if one is not held. Adds to `failures`.

        A file that fails may have others beside it that hold the same.
        """
        failed: set[RecordName] = set()
        while True:
            try:
                found = holdings.index.names_of(key, boxes)
            except OSError as error:
                failures.append(why_of(error))
                return None
            names = {name.box: name for name in found if name not in failed}
            if (plan := cover(boxes, names)) is None:
                return None
            payloads: list[tuple[Box, tuple[Box, ...], Tensor]] = []
            for held, parts in plan.items():
                payload = self._payload(holdings, key, record, names[held])
                if isinstance(payload, Miss):
                    failures.append(payload)
                    failed.add(names[held])
                    break
                payloads.append((held, parts, payload))
            else:
                return payloads

    def _payload(self, holdings: Holdings, key: BlockKey, record: Span, name: RecordName) -> Tensor | Miss:
        header = Header.of(self._namespace, key, name.box, len(record), self._state)
        try:
            return self._files.read(header, name)
        except _ERRORS as error:
            why = why_of(error)
            if why in DAMAGE:
                holdings.shelf.discard(key, name)
            holdings.index.forget(key)
            return why

    def _write_record(self, key: BlockKey, name: RecordName, record: Span, caches: PagedCaches, tables: Tables) -> int:
        """Bytes written: the layers that are there, if all are that see all tokens."""
        if self._holdings is None:
            raise Missed(self._why_not)
        if (boxes := filled_boxes(record, caches, tables, self._state)) is None:
            raise Missed(Miss.HOLE)
        if boxes != (name.box,):
            self._counts.add("hollow_records")
        return sum(
            self._write_box(self._holdings, key, dataclasses.replace(name, box=box), record, caches, tables)
            for box in boxes
        )

    def _write_box(
        self, holdings: Holdings, key: BlockKey, name: RecordName, record: Span, caches: PagedCaches, tables: Tables
    ) -> int:
        now = self._clock()
        # What is remembered may have been evicted by others, and would then never be written again.
        holdings.index.forget(key)
        held = holdings.index.names_of(key, (name.box,))
        if covers(tuple(other for other in held if other.priority_at(now) >= name.priority), (name.box,)):
            self._counts.add("kept_records")
            return 0
        header = Header.of(self._namespace, key, name.box, len(record), self._state)
        self._files.write(header, name, self._records.gather(name.box, record, caches, tables))
        holdings.index.forget(key)
        self._counts.add("written_records")
        self._counts.add("written_bytes", header.file_bytes)
        return header.file_bytes

    def _missed(self, what: str, why: Miss) -> int:
        self._counts.add(f"{what} {why}")
        return 0

    def _check_chain(self, chain: PrefixChain) -> None:
        if chain.tokens_per_record != self._tokens_per_record:
            sizes = f"ours={self._tokens_per_record}, theirs={chain.tokens_per_record}"
            raise CallerError(f"the chain is cut into other records: {sizes}")

    def _check(self, chain: PrefixChain, tokens: Span, caches: PagedCaches, tables: Tables) -> None:
        self._check_chain(chain)
        chain.check(tokens)
        if not caches.planes:
            return
        plane, box, state = caches.planes[0], _box_of(caches), self._state
        ours = (state.num_planes, state.dtype, state.head_size, True)
        inside = self._model.layers.covers(box.layers) and self._model.heads.covers(box.heads)
        theirs = (caches.num_planes, dtype_name(plane), plane.shape[3], inside)
        if ours != theirs:
            raise CallerError(f"caches of another kind (planes, type, elements, in the model): {ours=}, {theirs=}")
        num_tokens = min(map(len, tables), default=0) * caches.tokens_per_block
        if len(tables) != caches.num_groups or num_tokens < tokens.stop:
            sizes = f"tables={len(tables)}, groups={caches.num_groups}, held={num_tokens}, wanted={tokens}"
            raise CallerError(f"the tables do not hold these tokens: {sizes}")


def _box_of(caches: PagedCaches) -> Box:
    return Box(caches.layers, caches.heads)


def _check_state(state: CacheState) -> None:
    if not state.layout.is_plain:
        raise CallerError(f"opaque tiles cannot be cut into records: tile={state.layout.tile!r}")
    if state.parallel.num_context_ranks > 1:
        raise CallerError(
            f"ranks that share the tokens of a sequence have no store: context ranks={state.parallel.num_context_ranks}"
        )
