"""What every formatter can do: turn a chunk of paged cache into dense bytes, and back.

In:  a Chunk, this rank's caches, the blocks that hold its tokens here, and a dense uint8 array of the chunk's size.
Out: `split` fills the dense array, `concat` the blocks; both tell the routes their copies took.
Law: what `concat` writes is what `split` read, whatever the two ranks' blocks look like; or what a Conversion makes of
it. Nothing outside the chunk is written. On a GPU the copies are queued on the current stream and not waited for.
"""

from typing import Protocol

from torch import Tensor

from kv_kernels.block_table import Copied
from kv_kernels.launch import Route
from kv_transfer.formatter.conversion import Conversion
from kv_transfer.plan.plan import Chunk
from kv_transfer.plan.ranges import BlockRange
from kv_transfer.pools import PagedCaches
from kv_transfer.request_blocks import RequestBlocks


class Formatter(Protocol):
    """Made by `select.formatter_for`, once per sender: the sender's CacheState fixes the order of the dense bytes."""

    def split(self, chunk: Chunk, caches: PagedCaches, block_range: BlockRange, out: Tensor) -> tuple[Route, ...]:
        """Gathers the chunk from our blocks into `out`, uint8 [chunk.num_bytes]."""
        ...

    def concat(
        self,
        chunk: Chunk,
        caches: PagedCaches,
        block_range: BlockRange,
        src: Tensor,
        conversion: Conversion | None = None,
    ) -> tuple[Route, ...]:
        """Scatters `src`, uint8 [chunk.num_bytes], into our blocks; elements of another type by way of `conversion`."""
        ...

    def split_blocks(
        self, chunk: Chunk, caches: PagedCaches, blocks: RequestBlocks, out: Tensor, summed_at: int | None = None
    ) -> tuple[Copied, ...]:
        """As `split`, one launch for each kind of plane, with no upload but the first for these blocks.

        `summed_at`: the first of these bytes is this byte of what is summed; each copy then tells its part of the sum.
        """
        ...

    def concat_blocks(
        self,
        chunk: Chunk,
        caches: PagedCaches,
        blocks: RequestBlocks,
        src: Tensor,
        summed_at: int | None = None,
        conversion: Conversion | None = None,
    ) -> tuple[Copied, ...]:
        """As `concat` and `split_blocks`; what is converted is not summed: `summed_at` is None then."""
        ...
