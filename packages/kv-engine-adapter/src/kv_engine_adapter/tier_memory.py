"""One rank's host slots: memory in which blocks lie in nobody's layout.

In:  the rank's caches on the device and their block tables.
Out: copies into slots and back, and the slots as `PagedCaches` for whoever reads or writes them as such.
Law: a slot is one run of memory, [L, C, T, H, D], whatever the device's blocks look like: formatters lay it out, as if
     the host were a peer with token-major blocks. With checksums, nothing is copied from a slot whose bytes have
     changed since it was filled. On CUDA all is queued on a stream of its own, and the calling thread waits for it.
     Of a group of layers whose table has a hole, or that is left out, nothing of the slot is read or written.

Legend: S slots, L layers of the rank, C planes of a layer, T tokens of a slot, H heads of the rank, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Final, cast

import msgspec
import torch
from torch import Tensor

from kv_core.errors import CallerError
from kv_core.ids import BlockId
from kv_core.spans import Span
from kv_engine_adapter.orders import Tables
from kv_engine_adapter.tier_orders import Absent
from kv_kernels.block_copy import copy_blocks
from kv_kernels.layout import Corner
from kv_transfer.checksum import Summer
from kv_transfer.formatter.select import formatter_for
from kv_transfer.plan.cache_state import BlockLayout, CacheState
from kv_transfer.plan.part import Part
from kv_transfer.plan.plan import Chunk, Piece
from kv_transfer.plan.ranges import HOLE, BlockRange, block_range
from kv_transfer.pools import PagedCaches

_ROUNDS: Final = 5
"""Of a measurement; the first ones warm up."""
_BATCH_BYTES: Final = 4 << 20
"""Of one copy between caches of the CPU, which needs as much memory in between."""


class Damaged(OSError):
    """A slot does not hold what was written to it."""


class HostMemory:
    """The slots of one rank; copied by one thread, read and written by others as `caches`."""

    def __init__(
        self,
        state: CacheState,
        device: PagedCaches,
        tokens_per_slot: int,
        num_slots: int,
        *,
        verify: bool = False,
        groups: Sequence[int] = (0,),
    ) -> None:
        """`groups` are the scheduler's that have layers here. CallerError for caches that cannot be cut into tokens."""
        if not state.layout.is_plain:
            raise CallerError(f"the host tier keeps plain blocks: tile={state.layout.tile!r}")
        if len(groups) != device.num_groups:
            raise CallerError(f"groups are not those of the caches: told={groups}, caches={device.num_groups}")
        self._device = device
        self._groups = tuple(groups)
        self._layers = _by_group(device)
        self._may_lack = any(state.windows)
        self._tokens_per_slot = tokens_per_slot
        self._formatter = formatter_for(msgspec.structs.replace(state, layout=BlockLayout("token_major")))
        self._row_bytes = state.bytes_per_token_head
        self._shape = (len(device.layers), device.num_planes, tokens_per_slot, len(device.heads))
        self._stream = torch.cuda.Stream(device.planes[0].device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._rows = torch.empty(num_slots, self._slot_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        self.caches = self._as_caches(state)
        """The slots as blocks, token major, of `tokens_per_slot` tokens."""
        self._sums: dict[tuple[int, int], int] | None = {} if verify else None

    @property
    def _is_cuda(self) -> bool:
        return bool(self._device.planes) and self._device.planes[0].is_cuda

    @property
    def _slot_bytes(self) -> int:
        layers, planes, tokens, heads = self._shape
        return layers * planes * tokens * heads * self._row_bytes

    @property
    def num_host_bytes(self) -> int:
        return self._rows.numel()

    def num_bytes(self, tokens: Span) -> int:
        """Bytes of so many tokens on this rank."""
        return len(tokens) * self._slot_bytes // self._tokens_per_slot

    def fence(self) -> "torch.cuda.Event | None":
        """What the calling thread has queued so far on the device; copies wait for it."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device.planes[0].device))
        return event

    def save(
        self,
        tokens: Span,
        slots: Sequence[int],
        tables: Tables,
        fence: "torch.cuda.Event | None",
        absent: Absent = (),
    ) -> None:
        """Fill slots with the blocks that hold these tokens, whole ones; but for what is `absent`."""
        if not self._device.planes:
            return
        whole = self._tokens_of(tokens.blocks(self._tokens_per_slot))
        if self._stream is None:
            self._copy_here(whole, slots, tables, absent, to_host=True)
        else:
            with _Queued(self._stream, fence):
                for group, part, held in self._blocks(whole, slots, tables, absent):
                    self._save_block(group, held, part, tables)
        self._note_filled(self._blocks(whole, slots, tables, absent))

    def filled(self, tokens: Span, slots: Sequence[int], absent: Absent = ()) -> None:
        """Somebody has filled these slots, but for what is `absent`."""
        everything = ((0,) * (-(-tokens.stop // self._device.tokens_per_block)),) * len(self._groups)
        if self._device.planes:
            self._note_filled(self._blocks(tokens, slots, everything, absent))

    def load(self, tokens: Span, slots: Sequence[int], tables: Tables, fence: "torch.cuda.Event | None") -> None:
        """Fill the blocks of these tokens, and nothing else, from slots; `Damaged` before anything is written."""
        if not self._device.planes:
            return
        if self._sums is not None:
            self._verify(self._blocks(tokens, slots, tables, ()))
        if self._stream is None:
            self._copy_here(tokens, slots, tables, (), to_host=False)
        else:
            with _Queued(self._stream, fence):
                for group, part, held in self._blocks(tokens, slots, tables, ()):
                    self._load_block(group, held, part, tables)

    def measure(self, tables: Tables, clock: Callable[[], float]) -> tuple[float, float]:
        """Seconds a token of saving and of loading: the best of some copies of one block that holds nothing.

        What is loaded is what was saved, so the block is as before. Slot 0 holds nothing yet, either.
        """
        tokens = Span(0, self._tokens_per_slot)

        def best(copy: Callable[..., None]) -> float:
            took = []
            for _ in range(_ROUNDS):
                began = clock()
                copy(tokens, (0,), tables, None)
                took.append(clock() - began)
            return min(took) / len(tokens)

        return best(self.save), best(self.load)

    def _copy_here(self, tokens: Span, slots: Sequence[int], tables: Tables, absent: Absent, *, to_host: bool) -> None:
        """Between caches of the CPU, many blocks in one call: of calls for one block most of the time is Python's.

        Evidence: 900 tokens of 4 KiB in blocks of 32, one core of an AMD EPYC, 2026-11-30: 1.0 ms to save and 1.8 to
        load where blocks are head major, 0.8 and 1.1 where token major; with a call for each block 7, 8, 5 and 5.
        """
        num_kinds, heads = self._device.num_planes, self._device.heads
        for group, part, held in self._batches(tokens, slots, tables, absent):
            found = Part.of(heads, part, self._device.geometry, self._range(group, part, tables))
            host = held, Corner(part.start % self._tokens_per_slot)
            device = found.block_ids, Corner(found.first_token)
            (ids, at), (source_ids, source_at) = (host, device) if to_host else (device, host)
            copy = partial(copy_blocks, num_tokens=len(part), num_heads=len(heads), at=at, source_at=source_at)
            planes = self._planes(group, self.caches), self._planes(group, self._device)
            ours, theirs = planes if to_host else planes[::-1]
            for kind in range(num_kinds):
                copy(ours[kind::num_kinds], ids, theirs[kind::num_kinds], source_ids)

    def _runs(
        self, tokens: Span, slots: Sequence[int], tables: Tables, absent: Absent
    ) -> Iterator[tuple[int, Span, Sequence[int]]]:
        """For each group neighbouring blocks that are to be copied, and their slots."""
        blocks, ratio = tokens.blocks(self._tokens_per_slot), self._tokens_per_slot // self._device.tokens_per_block
        for group, number in enumerate(self._groups):
            if not self._may_lack:
                yield group, tokens, slots
                continue
            left_out = absent[number] if absent else ()
            there = [at not in left_out and tables[group][at * ratio] != HOLE for at in blocks]
            for is_there, run in groupby(blocks, key=lambda at, there=there: there[at - blocks.start]):  # type: ignore[misc]
                found = list(run)
                if is_there:
                    held = slots[found[0] - blocks.start : found[-1] + 1 - blocks.start]
                    yield group, tokens & self._tokens_of(Span(found[0], found[-1] + 1)), held

    def _batches(
        self, tokens: Span, slots: Sequence[int], tables: Tables, absent: Absent
    ) -> Iterator[tuple[int, Span, Sequence[int]]]:
        """A few blocks at a time."""
        step = max(1, _BATCH_BYTES // self._slot_bytes)
        for group, run, held in self._runs(tokens, slots, tables, absent):
            first = run.start // self._tokens_per_slot
            for at in range(0, len(held), step):
                part = run & self._tokens_of(Span(first + at, first + at + step))
                yield group, part, held[at : at + step]

    def _blocks(
        self, tokens: Span, slots: Sequence[int], tables: Tables, absent: Absent
    ) -> Iterator[tuple[int, Span, int]]:
        """The same block by block."""
        for group, run, held in self._runs(tokens, slots, tables, absent):
            for slot, part in zip(held, self._parts(run), strict=True):
                yield group, part, slot

    def _save_block(self, group: int, slot: int, tokens: Span, tables: Tables) -> None:
        blocks = self._range(group, tokens, tables)
        for layers in self._layers[group]:
            row = self._row(slot, layers)
            dense = torch.empty_like(row, device=self._device.planes[0].device)
            self._formatter.split(self._chunk(layers, tokens), self._device, blocks, dense)
            row.copy_(dense, non_blocking=True)

    def _load_block(self, group: int, slot: int, tokens: Span, tables: Tables) -> None:
        blocks = self._range(group, tokens, tables)
        for layers in self._layers[group]:
            dense = self._cut(slot, layers, tokens).to(self._device.planes[0].device)
            self._formatter.concat(self._chunk(layers, tokens), self._device, blocks, dense)

    def _note_filled(self, blocks: Iterator[tuple[int, Span, int]]) -> None:
        if self._sums is not None:
            summer = Summer()
            self._sums.update(((slot, group), self._checksum(summer, slot, group)) for group, _, slot in blocks)

    def _verify(self, blocks: Iterator[tuple[int, Span, int]]) -> None:
        assert self._sums is not None, "law: only what has checksums is verified"
        summer = Summer()
        for group, _, slot in blocks:
            found, wanted = self._checksum(summer, slot, group), self._sums.get((slot, group))
            if found != wanted:
                raise Damaged(f"host slot {slot}: checksums differ: {found=}, {wanted=}")

    def _checksum(self, summer: Summer, slot: int, group: int) -> int:
        rows = [self._row(slot, layers) for layers in self._layers[group]]
        return summer.checksum_now(rows[0] if len(rows) == 1 else torch.cat(rows))

    def _parts(self, tokens: Span) -> Iterator[Span]:
        return (tokens & self._tokens_of(Span(block, block + 1)) for block in tokens.blocks(self._tokens_per_slot))

    def _tokens_of(self, blocks: Span) -> Span:
        return Span(blocks.start * self._tokens_per_slot, blocks.stop * self._tokens_per_slot)

    def _planes(self, group: int, caches: PagedCaches) -> tuple[Tensor, ...]:
        return tuple(plane for layers in self._layers[group] for plane in caches.planes_of_layers(layers))

    def _range(self, group: int, tokens: Span, tables: Tables) -> BlockRange:
        return block_range(cast("Sequence[BlockId]", tables[group]), tokens, self._device.tokens_per_block)

    def _chunk(self, layers: Span, tokens: Span) -> Chunk:
        num_bytes = self.num_bytes(tokens) * len(layers) // len(self._device.layers)
        return Chunk(0, Piece(layers, self._device.heads), tokens, num_bytes)

    def _row(self, slot: int, layers: Span) -> Tensor:
        """The bytes of some layers of a slot."""
        each, first = self._slot_bytes // len(self._device.layers), self._device.first_layer
        return self._rows[slot, (layers.start - first) * each : (layers.stop - first) * each]

    def _cut(self, slot: int, layers: Span, tokens: Span) -> Tensor:
        """The bytes of these tokens of some layers of one block."""
        start, row = tokens.start % self._tokens_per_slot, self._row(slot, layers)
        if len(tokens) == self._tokens_per_slot:
            return row
        rows = row.view(len(layers), *self._shape[1:], self._row_bytes)
        return rows[:, :, start : start + len(tokens)].reshape(-1)

    def _as_caches(self, state: CacheState) -> PagedCaches:
        typed = self._rows.view(getattr(torch, state.dtype)) if self._device.planes else self._rows
        slots = typed.view(len(typed), *self._shape, -1) if self._device.planes else typed
        layers, num_planes = self._shape[:2]
        planes = tuple(slots[:, layer, plane] for layer in range(layers) for plane in range(num_planes))
        first_head, groups = self._device.first_head, self._device.groups
        return PagedCaches(
            self._device.first_layer, planes, first_head, self._tokens_per_slot, num_planes, groups=groups
        )


def _by_group(caches: PagedCaches) -> tuple[tuple[Span, ...], ...]:
    """For each group its layers, neighbours together."""
    runs = list(caches.by_group(caches.layers)) if caches.planes else []
    return tuple(tuple(layers for layers, of in runs if of == group) for group in range(caches.num_groups))


class _Queued:
    """Copies on a stream, after a fence, waited for at the end."""

    def __init__(self, stream: "torch.cuda.Stream", fence: "torch.cuda.Event | None") -> None:
        self._stream = stream
        self._on = torch.cuda.stream(stream)
        if fence is not None:
            stream.wait_event(fence)

    def __enter__(self) -> None:
        self._on.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self._on.__exit__(*error)
        self._stream.synchronize()
