"""Which formatter serves a sender.

In:  the sender's CacheState.
Out: the Formatter for its kind of attention.
Law: a kind nobody has written a formatter for is refused by name, never served by another's.
"""

from kv_core.errors import CallerError
from kv_transfer.formatter.attention import AttentionFormatter
from kv_transfer.formatter.base import Formatter
from kv_transfer.formatter.latent import LatentFormatter
from kv_transfer.plan.cache_state import BLOCK_SCALE, FULL, INDEXER, LATENT, CacheState


def formatter_for(sender: CacheState) -> Formatter:
    """The formatter both sides use for chunks of this sender; CallerError if there is none."""
    if sender.attention in (FULL, BLOCK_SCALE):
        return AttentionFormatter(sender.layout.order)
    if sender.attention in (LATENT, INDEXER):
        return LatentFormatter()
    known = ", ".join(map(repr, (FULL, LATENT, INDEXER, BLOCK_SCALE)))
    raise CallerError(f"no formatter for this attention: got={sender.attention!r}, known={known}")
