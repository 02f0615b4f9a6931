"""The formatter of latent attention (MLA) and of indexer pools: one head that every tensor rank holds whole.

In, out, law: see `base`. The dense array is [L, C, T', D]. Only layers and tokens are cut: a rank takes all of a row
or nothing of it, and which of the equal ranks sends is the plan's choice. Transfer spec 10; defects A6, A9 to A11, H3.

Legend: L layers of the chunk, C planes of a layer (1, or 2), T' tokens of the chunk, D elements of a row.
"""

from dataclasses import dataclass

from torch import Tensor

from kv_core.errors import CallerError
from kv_core.spans import Span
from kv_kernels.launch import Route
from kv_transfer.formatter.attention import AttentionFormatter
from kv_transfer.formatter.conversion import Conversion
from kv_transfer.plan.plan import Chunk
from kv_transfer.plan.ranges import BlockRange
from kv_transfer.pools import PagedCaches

# With one head both block orders lie alike in memory.
_ROWS = AttentionFormatter("token_major")


@dataclass(frozen=True, slots=True)
class LatentFormatter:
    """Splits and concatenates chunks of the one head."""

    def split(self, chunk: Chunk, caches: PagedCaches, block_range: BlockRange, out: Tensor) -> tuple[Route, ...]:
        """See `base.Formatter.split`; CallerError if the chunk names another head, or the parts do not fit."""
        _check_one_head(chunk, caches)
        return _ROWS.split(chunk, caches, block_range, out)

    def concat(
        self,
        chunk: Chunk,
        caches: PagedCaches,
        block_range: BlockRange,
        src: Tensor,
        conversion: Conversion | None = None,
    ) -> tuple[Route, ...]:
        """See `base.Formatter.concat`; CallerError if the chunk names another head, or the parts do not fit."""
        _check_one_head(chunk, caches)
        return _ROWS.concat(chunk, caches, block_range, src, conversion)


def _check_one_head(chunk: Chunk, caches: PagedCaches) -> None:
    if chunk.piece.heads != Span(0, 1) or caches.heads != Span(0, 1):
        raise CallerError(f"a latent row has one head: wanted={chunk.piece.heads}, held={caches.heads}")
