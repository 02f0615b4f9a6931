"""What every formatter can do: turn a chunk of paged cache into dense bytes, and back.

In:  a Chunk, this rank's caches, the blocks that hold its tokens here, and a dense uint8 array of the chunk's size.
Out: `split` fills the dense array, `concat` the blocks; both tell the routes their copies took.
Law: what `concat` writes is what `split` read, whatever the two ranks' blocks look like; or what a Conversion makes of
it. Nothing outside the chunk is written. On a GPU the copies are queued on the current stream and not waited for.
"""

from typing import Protocol

from torch import Tensor

from kv_kernels.launch import Route
from kv_transfer.formatter.conversion import Conversion
from kv_transfer.plan.plan import Chunk
from kv_transfer.plan.ranges import BlockRange
from kv_transfer.pools import PagedCaches


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
