"""The formatter of full attention and of block scales: K and V of every layer, cut by layers, heads and tokens.

In, out, law: see `base`. The dense array is [L, C, T', H', D] or [L, C, H', T', D], as the sender's blocks are ordered;
where tiles are opaque T' counts blocks and D spans a tile. Transfer spec 6.2, 6.3, 6.10; defects A3, A14.

Legend: L layers of the chunk, C planes of a layer, T' tokens and H' heads of the chunk, D head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_core.errors import CallerError
from kv_kernels.block_table import At, BlockTable, Copied, gather_part, scatter_part
from kv_kernels.gather import gather
from kv_kernels.launch import Route
from kv_kernels.scatter import scatter
from kv_transfer.formatter.conversion import Conversion
from kv_transfer.plan.cache_state import BlockOrder
from kv_transfer.plan.part import Part
from kv_transfer.plan.plan import Chunk
from kv_transfer.plan.ranges import BlockRange
from kv_transfer.pools import PagedCaches
from kv_transfer.request_blocks import RequestBlocks


@dataclass(frozen=True, slots=True)
class AttentionFormatter:
    """Splits and concatenates chunks whose dense bytes are in the sender's `order`."""

    order: BlockOrder

    def split(self, chunk: Chunk, caches: PagedCaches, block_range: BlockRange, out: Tensor) -> tuple[Route, ...]:
        """See `base.Formatter.split`; CallerError if chunk, caches, blocks and bytes do not fit each other."""
        self.check(chunk, caches)
        part = Part.of(chunk.piece.heads, chunk.tokens, caches.geometry, block_range)
        return tuple(
            gather(dense, planes, part.block_ids, first_token=part.first_token, first_head=part.first_head)
            for dense, planes in self._copies(chunk, caches, part, out)
        )

    def concat(
        self,
        chunk: Chunk,
        caches: PagedCaches,
        block_range: BlockRange,
        src: Tensor,
        conversion: Conversion | None = None,
    ) -> tuple[Route, ...]:
        """See `base.Formatter.concat`; CallerError if chunk, caches, blocks and bytes do not fit each other."""
        self.check(chunk, caches)
        part = Part.of(chunk.piece.heads, chunk.tokens, caches.geometry, block_range)
        return tuple(
            scatter(planes, dense, part.block_ids, first_token=part.first_token, first_head=part.first_head)
            for dense, planes in self._copies(chunk, caches, part, src, conversion)
        )

    def split_blocks(
        self, chunk: Chunk, caches: PagedCaches, blocks: RequestBlocks, out: Tensor, summed_at: int | None = None
    ) -> tuple[Copied, ...]:
        """See `base.Formatter.split_blocks`; CallerError as `split`."""
        return tuple(
            gather_part(dense, table, at, summed_at=byte)
            for dense, table, at, byte in self._parts(chunk, caches, blocks, out, summed_at)
        )

    def concat_blocks(
        self,
        chunk: Chunk,
        caches: PagedCaches,
        blocks: RequestBlocks,
        src: Tensor,
        summed_at: int | None = None,
        conversion: Conversion | None = None,
    ) -> tuple[Copied, ...]:
        """See `base.Formatter.concat_blocks`; CallerError as `concat`."""
        return tuple(
            scatter_part(table, dense, at, summed_at=byte)
            for dense, table, at, byte in self._parts(chunk, caches, blocks, src, summed_at, conversion)
        )

    def check(self, chunk: Chunk, caches: PagedCaches) -> None:
        """CallerError if a kind of attention allows less than `Part` does; any heads are full attention's."""

    def _parts(
        self,
        chunk: Chunk,
        caches: PagedCaches,
        blocks: RequestBlocks,
        flat: Tensor,
        summed_at: int | None,
        conversion: Conversion | None = None,
    ) -> Iterator[tuple[Tensor, BlockTable, At, int | None]]:
        """(dense view [P, T', H', D], the table of its planes, where it begins there, its first byte in the sum)."""
        self.check(chunk, caches)
        layers, held = chunk.piece.layers, caches.layers
        if not held.covers(layers):
            raise CallerError(f"layers are not held: wanted={layers}, held={held}")
        found = blocks.holding(chunk.tokens, caches.tokens_per_block)
        part = Part.of(chunk.piece.heads, chunk.tokens, caches.geometry, found)
        first_token = found.ordinals.start * caches.planes[0].shape[1] + part.first_token
        dense = self._elements(chunk, caches, part, flat, conversion)
        first_layer = layers.start - held.start
        if len(blocks.kinds) == 1:
            at = At(first_layer * caches.num_planes, first_token, part.first_head)
            yield dense.flatten(0, 1), blocks.kinds[0], at, summed_at
            return
        at, plane_bytes = At(first_layer, first_token, part.first_head), dense[0, 0].nbytes
        for kind, table in enumerate(blocks.kinds):
            yield dense[:, kind], table, at, None if summed_at is None else summed_at + kind * plane_bytes

    def _copies(
        self, chunk: Chunk, caches: PagedCaches, part: Part, flat: Tensor, conversion: Conversion | None = None
    ) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """(dense view [P, T', H', D], its planes) of each copy: one, or one per kind if K and V differ in strides."""
        planes = caches.planes_of_layers(chunk.piece.layers)
        dense = self._elements(chunk, caches, part, flat, conversion)
        if len({plane.stride() for plane in planes}) == 1:
            yield dense.flatten(0, 1), planes
            return
        for kind in range(caches.num_planes):
            yield dense[:, kind], planes[kind :: caches.num_planes]

    def _elements(
        self, chunk: Chunk, caches: PagedCaches, part: Part, flat: Tensor, conversion: Conversion | None
    ) -> Tensor:
        """The bytes as [L, C, T', H', D] of our own type."""
        if conversion is None:
            return self._dense(chunk, caches, part, flat, caches.planes[0].dtype)
        dense = self._dense(chunk, caches, part, flat, conversion.source)
        elements = conversion.converted(dense.flatten(0, 1), chunk.piece.layers)
        return torch.unflatten(elements, 0, (-1, caches.num_planes))

    def _dense(self, chunk: Chunk, caches: PagedCaches, part: Part, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """The bytes as [L, C, T', H', D] of this type."""
        num_layers, num_heads, head_size = len(chunk.piece.layers), len(chunk.piece.heads), caches.planes[0].shape[3]
        num_bytes = num_layers * caches.num_planes * part.num_tokens * num_heads * head_size * dtype.itemsize
        if not (flat.numel() * flat.itemsize == chunk.num_bytes == num_bytes):
            sizes = f"array={flat.numel() * flat.itemsize}, chunk={chunk.num_bytes}, blocks={num_bytes}"
            raise CallerError(f"sizes in bytes do not agree: {sizes}")
        typed = flat.view(dtype)
        if self.order == "token_major":
            return typed.view(num_layers, caches.num_planes, part.num_tokens, num_heads, -1)
        return typed.view(num_layers, caches.num_planes, num_heads, part.num_tokens, -1).transpose(2, 3)
