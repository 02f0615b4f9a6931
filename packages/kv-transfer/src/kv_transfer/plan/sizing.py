"""How much staging memory requests need so that none waits for room.

In:  what one rank holds of a token, by window; the longest request; how many are to be in flight.
Out: bytes, for `TransferConfig.send_arena_bytes` or `receive_arena_bytes`.
Law: an upper bound. Less is legal: a smaller arena costs waiting, never a request, because chunks reuse it. Transfer
spec 7.3; defects D12, D14.
"""

from collections.abc import Mapping

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import ceil_div
from kv_transfer.plan.cache_state import CacheState


def token_bytes(state: CacheState, rank: Rank) -> dict[int, int]:
    """Bytes that one token takes on `rank`, by window of the layers; 0 is the window of layers that see all."""
    share = state.share_of(rank)
    found: dict[int, int] = {}
    for layer in share.layers:
        window = state.window_of(layer)
        found[window] = found.get(window, 0) + len(share.heads) * state.num_planes * state.bytes_per_token_head
    return found


def staging_bytes(
    bytes_per_token: Mapping[int, int], num_tokens: int, tokens_per_block: int, num_requests: int = 1
) -> int:
    """Bytes in which `num_requests` requests of up to `num_tokens` tokens lie at once; CallerError below one of each.

    Of a window's layers only its tokens move. They count in whole blocks and one more, as a window may begin and end
    inside a block.
    """
    for what, count in (("tokens", num_tokens), ("tokens per block", tokens_per_block), ("requests", num_requests)):
        if count < 1:
            raise CallerError(f"nothing is staged without {what}: got={count}")
    one = sum(
        (_moved(window, num_tokens, tokens_per_block) + tokens_per_block) * size
        for window, size in bytes_per_token.items()
    )
    return one * num_requests


def _moved(window: int, num_tokens: int, tokens_per_block: int) -> int:
    return min(ceil_div(window, tokens_per_block) * tokens_per_block, num_tokens) if window else num_tokens
