"""One rank's host slots: memory in which blocks lie in nobody's layout.

In:  the rank's caches on the device and their block tables.
Out: copies into slots and back, and the slots as `PagedCaches` for whoever reads or writes them as such.
Law: a slot is one run of memory, [L, C, T, H, D], whatever the device's blocks look like: formatters lay it out, as if
     the host were a peer with token-major blocks. With checksums, nothing is copied from a slot whose bytes have
     changed since it was filled. On CUDA all is queued on a stream of its own, and the calling thread waits for it.

Legend: S slots, L layers of the rank, C planes of a layer, T tokens of a slot, H heads of the rank, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, cast

import msgspec
import torch
from torch import Tensor

from kv_core.errors import CallerError
from kv_core.ids import BlockId
from kv_core.spans import Span
from kv_engine_adapter.orders import Tables
from kv_kernels.block_copy import copy_blocks
from kv_kernels.layout import Corner
from kv_transfer.checksum import Summer
from kv_transfer.formatter.select import formatter_for
from kv_transfer.plan.cache_state import BlockLayout, CacheState
from kv_transfer.plan.part import Part
from kv_transfer.plan.plan import Chunk, Piece
from kv_transfer.plan.ranges import BlockRange, block_range
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
        self, state: CacheState, device: PagedCaches, tokens_per_slot: int, num_slots: int, *, verify: bool = False
    ) -> None:
        """CallerError for caches that cannot be cut into tokens, or whose layers have several block tables."""
        if not state.layout.is_plain:
            raise CallerError(f"the host tier keeps plain blocks: tile={state.layout.tile!r}")
        if device.num_groups > 1 or any(state.windows):
            raise CallerError("the host tier keeps models whose layers all see all tokens, with one block table")
        self._device = device
        self._tokens_per_slot = tokens_per_slot
        self._formatter = formatter_for(msgspec.structs.replace(state, layout=BlockLayout("token_major")))
        self._piece = Piece(device.layers, device.heads)
        self._row_bytes = state.bytes_per_token_head
        self._shape = (len(device.layers), device.num_planes, tokens_per_slot, len(device.heads))
        self._stream = torch.cuda.Stream(device.planes[0].device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._rows = torch.empty(num_slots, self._slot_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        self.caches = self._as_caches(state)
        """The slots as blocks, token major, of `tokens_per_slot` tokens."""
        self._sums: dict[int, int] | None = {} if verify else None

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

    def save(self, tokens: Span, slots: Sequence[int], tables: Tables, fence: "torch.cuda.Event | None") -> None:
        """Fill slots with the blocks that hold these tokens, whole ones."""
        if not self._device.planes:
            return
        blocks = tokens.blocks(self._tokens_per_slot)
        if self._stream is None:
            self._copy_here(self._tokens_of(blocks), slots, tables, to_host=True)
        else:
            with _Queued(self._stream, fence):
                for slot, block in zip(slots, blocks, strict=True):
                    self._save_block(slot, self._tokens_of(Span(block, block + 1)), tables)
        self.filled(slots)

    def filled(self, slots: Sequence[int]) -> None:
        """Somebody has filled these slots."""
        if self._sums is not None:
            summer = Summer()
            self._sums.update((slot, summer.checksum_now(self._rows[slot])) for slot in slots)

    def load(self, tokens: Span, slots: Sequence[int], tables: Tables, fence: "torch.cuda.Event | None") -> None:
        """Fill the blocks of these tokens, and nothing else, from slots; `Damaged` before anything is written."""
        if not self._device.planes:
            return
        self._verify(slots)
        if self._stream is None:
            self._copy_here(tokens, slots, tables, to_host=False)
        else:
            with _Queued(self._stream, fence):
                for slot, part in zip(slots, self._parts(tokens), strict=True):
                    self._load_block(slot, part, tables)

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

    def _copy_here(self, tokens: Span, slots: Sequence[int], tables: Tables, *, to_host: bool) -> None:
        """Between caches of the CPU, many blocks in one call: of calls for one block most of the time is Python's.

        Evidence: 900 tokens of 4 KiB in blocks of 32, one core of an AMD EPYC, 2026-11-30: 1.0 ms to save and 1.8 to
        load where blocks are head major, 0.8 and 1.1 where token major; with a call for each block 7, 8, 5 and 5.
        """
        num_kinds, heads = self._device.num_planes, self._device.heads
        for part, held in self._batches(tokens, slots):
            _, blocks = self._chunk(part, tables)
            found = Part.of(heads, part, self._device.geometry, blocks)
            host = held, Corner(part.start % self._tokens_per_slot)
            device = found.block_ids, Corner(found.first_token)
            (ids, at), (source_ids, source_at) = (host, device) if to_host else (device, host)
            copy = partial(copy_blocks, num_tokens=len(part), num_heads=len(heads), at=at, source_at=source_at)
            for kind in range(num_kinds):
                planes = self.caches.planes[kind::num_kinds], self._device.planes[kind::num_kinds]
                ours, theirs = planes if to_host else planes[::-1]
                copy(ours, ids, theirs, source_ids)

    def _batches(self, tokens: Span, slots: Sequence[int]) -> Iterator[tuple[Span, Sequence[int]]]:
        """A few blocks at a time."""
        first, step = tokens.start // self._tokens_per_slot, max(1, _BATCH_BYTES // self._slot_bytes)
        for at in range(0, len(slots), step):
            yield tokens & self._tokens_of(Span(first + at, first + at + step)), slots[at : at + step]

    def _save_block(self, slot: int, tokens: Span, tables: Tables) -> None:
        chunk, blocks = self._chunk(tokens, tables)
        dense = torch.empty_like(self._rows[slot], device=self._device.planes[0].device)
        self._formatter.split(chunk, self._device, blocks, dense)
        self._rows[slot].copy_(dense, non_blocking=True)

    def _load_block(self, slot: int, tokens: Span, tables: Tables) -> None:
        chunk, blocks = self._chunk(tokens, tables)
        dense = self._cut(slot, tokens)
        self._formatter.concat(chunk, self._device, blocks, dense.to(self._device.planes[0].device))

    def _verify(self, slots: Sequence[int]) -> None:
        if self._sums is not None:
            summer = Summer()
            for slot in slots:
                if (found := summer.checksum_now(self._rows[slot])) != self._sums.get(slot):
                    raise Damaged(f"host slot {slot}: checksums differ: found={found}, wanted={self._sums.get(slot)}")

    def _parts(self, tokens: Span) -> Iterator[Span]:
        return (tokens & self._tokens_of(Span(block, block + 1)) for block in tokens.blocks(self._tokens_per_slot))

    def _tokens_of(self, blocks: Span) -> Span:
        return Span(blocks.start * self._tokens_per_slot, blocks.stop * self._tokens_per_slot)

    def _chunk(self, tokens: Span, tables: Tables) -> tuple[Chunk, BlockRange]:
        table = cast("Sequence[BlockId]", tables[0])
        blocks = block_range(table, tokens, self._device.tokens_per_block)
        return Chunk(0, self._piece, tokens, self.num_bytes(tokens)), blocks

    def _cut(self, slot: int, tokens: Span) -> Tensor:
        """The bytes of these tokens of one block."""
        start = tokens.start % self._tokens_per_slot
        row = self._rows[slot]
        if len(tokens) == self._tokens_per_slot:
            return row
        rows = row.view(*self._shape, self._row_bytes)
        return rows[:, :, start : start + len(tokens)].reshape(-1)

    def _as_caches(self, state: CacheState) -> PagedCaches:
        typed = self._rows.view(getattr(torch, state.dtype)) if self._device.planes else self._rows
        slots = typed.view(len(typed), *self._shape, -1) if self._device.planes else typed
        layers, num_planes = self._shape[:2]
        planes = tuple(slots[:, layer, plane] for layer in range(layers) for plane in range(num_planes))
        first_head = self._device.first_head
        return PagedCaches(self._device.first_layer, planes, first_head, self._tokens_per_slot, num_planes)


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
