"""Blocks of vLLM that a copy still reads: another reference of ours keeps them, whatever becomes of their request.

In:  vLLM's KV cache manager; the blocks of a job.
Law: a block kept is given back once, when every rank has answered the job.

Why references: a request that has ended may also be on offer to peers, and one that is preempted loses its blocks at
once; neither need know of the copy.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kv_engine_adapter.tier_orders import JobId
from kv_transfer.plan.ranges import HOLE

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class DeviceLeases:
    """The blocks now read by copies."""

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self._held: dict[JobId, list[KVCacheBlock]] = {}

    def __len__(self) -> int:
        """Jobs that blocks are kept for."""
        return len(self._held)

    def bind(self, manager: "KVCacheManager") -> None:
        """Whose blocks they are."""
        self._manager = manager

    def hold(self, job: JobId, table: Iterable[int]) -> None:
        """Keep these blocks until `free`."""
        assert self._manager is not None, "law: no request ends before the manager is bound"
        pool = self._manager.block_pool
        blocks = [pool.blocks[block] for block in table if block != HOLE]
        pool.touch(blocks)
        self._held[job] = blocks

    def free(self, jobs: Iterable[JobId]) -> None:
        """The copies have ended; of blocks that nobody else has, the last goes first."""
        for job in jobs:
            assert self._manager is not None, "law: what is held was bound"
            self._manager.block_pool.free_blocks(reversed(self._held.pop(job)))
