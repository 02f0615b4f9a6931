"""A copy engine at work on pools, beside a memory that says what must lie where.

In:  pools; copies, as a manager's log lists them.
Out: what the engine says of them.
Law: what did not end as a miss is what the memory has.
"""

from kv_core.tiers import CopyLog, Place
from kv_testing.block_memory import Memory
from kv_transfer.block_pools import BlockPools
from kv_transfer.copy_engine import CopyEngine, Progress

NUM_TOKENS = 4


class CopyBench:
    """Pools, an engine and a log."""

    def __init__(self, pools: BlockPools, num_workers: int, within_s: float = 30.0) -> None:
        self.pools = pools
        self.memory = Memory(pools)
        self.engine = CopyEngine(pools, num_workers=num_workers)
        self.log = CopyLog()
        self._within_s = within_s

    def run(self, *copies: tuple[Place, Place]) -> Progress:
        """All of them, to their ends."""
        for source, destination in copies:
            self.log.copy(source, destination, NUM_TOKENS)
        orders = self.log.take()
        self.engine.submit(orders)
        progress = self.engine.wait(self._within_s)
        failed = {miss.order for miss in progress.misses}
        for order in orders:
            if order not in failed:
                self.memory.apply(order)
        assert progress.below == orders[-1].order_id + 1, "an order that fails has ended as well"
        self.log.done(progress.below)
        return progress
