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
from kv_kernels.gather import gather
from kv_kernels.launch import Route
from kv_kernels.scatter import scatter
from kv_transfer.formatter.conversion import Conversion
from kv_transfer.plan.cache_state import BlockOrder
from kv_transfer.plan.part import Part
from kv_transfer.plan.plan import Chunk
from kv_transfer.plan.ranges import BlockRange
from kv_transfer.pools import PagedCaches


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

    def check(self, chunk: Chunk, caches: PagedCaches) -> None:
        """CallerError if a kind of attention allows less than `Part` does; any heads are full attention's."""

    def _copies(
        self, chunk: Chunk, caches: PagedCaches, part: Part, flat: Tensor, conversion: Conversion | None = None
    ) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """(dense view [P, T', H', D], its planes) of each copy: one, or one per kind if K and V differ in strides."""
        planes = caches.planes_of_layers(chunk.piece.layers)
        dtype = caches.planes[0].dtype if conversion is None else conversion.source
        dense = self._dense(chunk, caches, part, flat, dtype)
        if conversion is not None:
            elements = conversion.converted(dense.flatten(0, 1), chunk.piece.layers)
            dense = torch.unflatten(elements, 0, (-1, caches.num_planes))
        if len({plane.stride() for plane in planes}) == 1:
            yield dense.flatten(0, 1), planes
            return
        for kind in range(caches.num_planes):
            yield dense[:, kind], planes[kind :: caches.num_planes]

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
