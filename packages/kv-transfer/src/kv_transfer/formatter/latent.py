"""The formatter of latent attention (MLA) and of indexer pools: one head that every tensor rank holds whole.

In, out, law: see `base`. The dense array is [L, C, T', D]. Only layers and tokens are cut: a rank takes all of a row
or nothing of it, and which of the equal ranks sends is the plan's choice. Transfer spec 10; defects A6, A9 to A11, H3.

Legend: L layers of the chunk, C planes of a layer (1, or 2), T' tokens of the chunk, D elements of a row.
"""

from dataclasses import dataclass

from kv_core.errors import CallerError
from kv_core.spans import Span
from kv_transfer.formatter.attention import AttentionFormatter
from kv_transfer.plan.cache_state import BlockOrder
from kv_transfer.plan.plan import Chunk
from kv_transfer.pools import PagedCaches


@dataclass(frozen=True, slots=True)
class LatentFormatter(AttentionFormatter):
    """Splits and concatenates chunks of the one head."""

    # With one head both block orders lie alike in memory.
    order: BlockOrder = "token_major"

    def check(self, chunk: Chunk, caches: PagedCaches) -> None:
        """CallerError if the chunk, or the caches, have another head."""
        if chunk.piece.heads != Span(0, 1) or caches.heads != Span(0, 1):
            raise CallerError(f"a latent row has one head: wanted={chunk.piece.heads}, held={caches.heads}")
