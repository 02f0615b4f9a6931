"""Moves a request between two tagged worlds: plan, split, concat, nothing else.

In:  the worlds of sender and receiver, the tokens, the groups that keep the request.
Out: for each chunk its dense bytes and the function that puts them into the receiver's blocks.
Law: each rank uses its own block table: a chunk's global tokens are turned into the rank's own by its share.
"""

from collections.abc import Callable, Iterator

import msgspec
import torch
from torch import Tensor

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.tagged import World
from kv_transfer.formatter.conversion import conversion_of
from kv_transfer.formatter.select import formatter_for
from kv_transfer.plan.plan import Chunk, chunks_of, receive_plans
from kv_transfer.plan.ranges import BlockRange, block_range


def carry(
    sender: World,
    receiver: World,
    tokens: Span,
    max_bytes: int = 1 << 30,
    spread: int = 0,
    *,
    from_group: int = 0,
    to_group: int = 0,
) -> int:
    """Moves everything; the bytes moved."""
    num_bytes = 0
    for dense, concat in chunks_between(
        sender, receiver, tokens, max_bytes, spread, from_group=from_group, to_group=to_group
    ):
        concat(dense)
        num_bytes += dense.numel()
    return num_bytes


def chunks_between(
    sender: World,
    receiver: World,
    tokens: Span,
    max_bytes: int,
    spread: int = 0,
    *,
    from_group: int = 0,
    to_group: int = 0,
    most_layers: int = 0,
) -> Iterator[tuple[Tensor, Callable[[Tensor], object]]]:
    """(dense bytes of a chunk, the function that concatenates them at its receiver), one after the other."""
    formatter = formatter_for(sender.state)
    for rank in receiver.state.parallel.ranks_of(to_group):
        plans = receive_plans(
            receiver.state, rank, sender.state, tokens, spread, group=from_group, num_tokens=sender.num_tokens
        )
        for plan in plans:
            for chunk in chunks_of(plan.pieces, plan.tokens, sender.state, max_bytes, most_layers):
                dense = torch.empty(chunk.num_bytes, dtype=torch.uint8)
                formatter.split(*own_view(sender, plan.sender, chunk), dense)
                yield dense, concatenation(receiver, rank, chunk, sender)


def concatenation(receiver: World, rank: Rank, chunk: Chunk, sender: World) -> Callable[[Tensor], object]:
    """What puts the bytes of this chunk into the rank's blocks."""
    formatter, view = formatter_for(sender.state), own_view(receiver, rank, chunk)
    conversion = conversion_of(sender.state, receiver.state)
    return lambda dense: formatter.concat(*view, dense, conversion)


def own_view(world: World, rank: Rank, chunk: Chunk) -> tuple[Chunk, object, BlockRange]:
    """The chunk in the rank's own token positions, its caches, and the blocks there."""
    state = world.state
    share = state.token_share(state.share_of(rank).context_rank, world.num_tokens)
    tokens = share.local(chunk.tokens)
    table = world.table_of(state.window_of(chunk.piece.layers.start))
    own = msgspec.structs.replace(chunk, tokens=tokens)
    return own, world.caches[rank], block_range(table, tokens, state.tokens_per_block)
