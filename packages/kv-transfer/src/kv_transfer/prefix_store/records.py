"""The payload of a record: a rank's blocks in the one order in which all ranks and engines agree.

In:  a rank's caches and block tables, a box of layers and heads, the tokens of a record.
Out: uint8 bytes [L, C, T, H, D] in host memory; or blocks filled from such bytes.
Law: the order of the bytes depends on the box and the tokens alone: neither on the block size nor on how blocks lie in
     memory. Formatters do the work; this is a transfer whose peer is a file.

Legend: L layers, C planes of a layer, T tokens, H heads, D head size.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec
import torch
from torch import Tensor

from kv_core.ids import BlockId
from kv_core.spans import Span
from kv_transfer.formatter.select import formatter_for
from kv_transfer.plan.cache_state import BlockLayout, CacheState
from kv_transfer.plan.plan import Chunk, Piece
from kv_transfer.plan.ranges import HOLE, BlockRange, block_range
from kv_transfer.pools import PagedCaches
from kv_transfer.prefix_store.boxes import Box

Tables = Sequence[Sequence[BlockId]]
"""A block table for each group of layers (`PagedCaches.groups`)."""


class Records:
    """Moves payloads of one cache."""

    def __init__(self, state: CacheState) -> None:
        self._formatter = formatter_for(msgspec.structs.replace(state, layout=BlockLayout("token_major")))
        self._num_planes = state.num_planes
        self._row_bytes = state.bytes_per_token_head

    def gather(self, box: Box, tokens: Span, caches: PagedCaches, tables: Tables) -> Tensor:
        """The bytes of a box that the rank holds."""
        dense = torch.empty(self._bytes(box, tokens), dtype=torch.uint8, device=caches.planes[0].device)
        for chunk, blocks, part in self._chunks(box, tokens, caches, tables, dense):
            self._formatter.split(chunk, caches, blocks, part)
        return dense.cpu()

    def scatter(
        self,
        payload: Tensor,
        held: Box,
        record: Span,
        part: Box,
        tokens: Span,
        caches: PagedCaches,
        tables: Tables,
    ) -> None:
        """Fill our blocks with a part of what a file holds: `payload` has the box `held` of all tokens `record`.

        Of layers whose table has holes, the tokens beside them.
        """
        for layers, group in caches.by_group(part.layers):
            box = Box(layers, part.heads)
            for run in beside_holes(tables[group], tokens, caches.tokens_per_block):
                dense = self._cut(payload, held, record, box, run).to(caches.planes[0].device)
                for chunk, blocks, source in self._chunks(box, run, caches, tables, dense):
                    self._formatter.concat(chunk, caches, blocks, source)

    def _cut(self, payload: Tensor, held: Box, record: Span, part: Box, tokens: Span) -> Tensor:
        rows = payload.view(len(held.layers), self._num_planes, len(record), len(held.heads), self._row_bytes)
        layers, heads = _within(part.layers, held.layers), _within(part.heads, held.heads)
        return rows[layers, :, _within(tokens, record), heads].reshape(-1)

    def _chunks(
        self, box: Box, tokens: Span, caches: PagedCaches, tables: Tables, dense: Tensor
    ) -> Iterator[tuple[Chunk, BlockRange, Tensor]]:
        """Neighbouring layers of one table, their blocks, and their bytes, which lie together; none without tokens."""
        if not tokens:
            return
        for layers, group in caches.by_group(box.layers):
            within, each = _within(layers, box.layers), self._bytes(Box(Span(0, 1), box.heads), tokens)
            part = dense[within.start * each : within.stop * each]
            blocks = block_range(tables[group], tokens, caches.tokens_per_block)
            yield Chunk(0, Piece(layers, box.heads), tokens, part.numel()), blocks, part

    def _bytes(self, box: Box, tokens: Span) -> int:
        return len(box) * self._num_planes * len(tokens) * self._row_bytes


def beside_holes(table: Sequence[BlockId], tokens: Span, tokens_per_block: int) -> Iterator[Span]:
    """Those of these tokens for which the table has blocks, run by run."""
    for is_hole, run in groupby(tokens.blocks(tokens_per_block), key=lambda block: table[block] == HOLE):
        if not is_hole:
            found = list(run)
            yield tokens & Span(found[0] * tokens_per_block, (found[-1] + 1) * tokens_per_block)


def _within(inner: Span, outer: Span) -> slice:
    return slice(inner.start - outer.start, inner.stop - outer.start)
