"""Copies one slot to another place, in all pools of its window.

In:  a CopyOrder.
Out: the first `num_tokens` tokens of every head, layer and plane are at the destination as well.
Law: what lies behind these tokens in a tensor stays as it was; files always hold whole slots. On CUDA copies between
     tensors are queued on the current stream, and a copy that touches a file waits for that stream before and after.
     OSError means that a file failed: the destination holds nothing of use.

Bytes are moved, never converted.
"""

import torch
from torch import Tensor

from kv_core.errors import CallerError
from kv_core.tiers import CopyOrder, Place, Tier
from kv_transfer.block_pools import BlockPools, Pool, WindowPools


class SlotCopier:
    """Executes orders over one manager's pools; any thread, as long as no two orders that depend on each other."""

    def __init__(self, pools: BlockPools) -> None:
        self._pools = pools

    def copy(self, order: CopyOrder) -> None:
        """Execute one order. CallerError if it names something that there is not."""
        window = self._window(order)
        size = window.pools[0].shape.tokens_per_block
        num_tokens = size if window.copies_whole else order.num_tokens
        for pool in window.pools:
            self._copy_in(pool, order.source, order.destination, num_tokens)

    def _copy_in(self, pool: Pool, source: Place, destination: Place, num_tokens: int) -> None:
        if Tier.DISK not in (source.tier, destination.tier):
            _copy_tokens(_slot(pool, source), _slot(pool, destination), num_tokens)
            return
        self._wait_for_stream()
        if destination.tier is Tier.DISK:
            pool.disk.write(destination.slot, _bytes(self._reachable(pool, source)))
        elif num_tokens == pool.shape.tokens_per_block and pool.disk.mover.reaches(
            pool.tensor(destination.tier).device
        ):
            pool.disk.read(source.slot, _bytes(_slot(pool, destination)))
        else:
            _copy_tokens(self._from_file(pool, source), _slot(pool, destination), num_tokens)
            self._wait_for_stream()

    def _reachable(self, pool: Pool, place: Place) -> Tensor:
        """A slot's whole content: the slot itself if it can be moved to a file from where it is, else a copy."""
        if place.tier is Tier.DISK:
            return self._from_file(pool, place)
        slot = _slot(pool, place)
        return slot if pool.disk.mover.reaches(slot.device) else slot.cpu()

    def _from_file(self, pool: Pool, place: Place) -> Tensor:
        slot = pool.device[0]
        return pool.disk.load(place.slot, torch.device("cpu")).view(slot.dtype).view(slot.shape)

    def _wait_for_stream(self) -> None:
        if self._pools.device.type == "cuda":
            torch.cuda.current_stream(self._pools.device).synchronize()

    def _window(self, order: CopyOrder) -> WindowPools:
        window = self._pools.windows.get(order.source.window)
        if window is None or order.source.window != order.destination.window:
            raise CallerError(f"an order stays in one of our windows: ours={list(self._pools.windows)}, theirs={order}")
        if not 1 <= order.num_tokens <= window.pools[0].shape.tokens_per_block:
            raise CallerError(f"an order copies tokens of one block: {order}")
        for place in (order.source, order.destination):
            if not 0 <= place.slot < window.config.num_blocks[place.tier]:
                raise CallerError(f"no such slot: ours={window.config.num_blocks[place.tier]}, theirs={place}")
        return window


def _slot(pool: Pool, place: Place) -> Tensor:
    return pool.tensor(place.tier)[place.slot]


def _copy_tokens(source: Tensor, destination: Tensor, num_tokens: int) -> None:
    """Both [L, C, H, T, D]. Whole slots are one asynchronous copy."""
    if num_tokens == destination.shape[-2]:
        destination.copy_(source, non_blocking=True)
        return
    # Why first across: torch reads a strided host tensor at once, before what is queued on the stream has written it.
    destination[..., :num_tokens, :].copy_(source.to(destination.device)[..., :num_tokens, :])


def _bytes(slot: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8 [n], a view."""
    assert slot.is_contiguous(), "law: a slot is one run of memory"
    return slot.view(-1).view(torch.uint8)
