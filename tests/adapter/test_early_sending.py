"""An engine whose prompt is preempted while it is sent: its blocks are another's, and nobody takes them for it.

The scheduler side, the worker side, the door and the ranks are the real ones; the engine is what is written here.
"""

from dataclasses import dataclass

import pytest

from kv_core.ids import Incarnation, InstanceId, RequestId
from kv_core.keys import BlockKey
from kv_core.spans import Span, ceil_div
from kv_engine_adapter.early import EarlyTerms
from kv_engine_adapter.known_peers import KnownPeers
from kv_engine_adapter.ports import ScheduledRequest
from kv_engine_adapter.scheduler import FerryScheduler, Identity
from kv_engine_adapter.worker import FerryWorker
from kv_testing.fake_door import FakeRequest
from kv_testing.tagged import fill
from kv_testing.waiting import wait_for
from kv_testing.worlds import NUM_TOKENS, PROMPT, fresh_id, pair

P = RequestId("p0")


@dataclass
class Prompt(FakeRequest):
    """The prompt that every Side has in its blocks."""

    def prompt_key(self) -> BlockKey | str:
        return BlockKey(PROMPT)


class Engine:
    """Of one side with one rank and one request."""

    def __init__(self, side):
        self.side, self.size, self.transfer_id = side, side.world.state.tokens_per_block, fresh_id()
        (self.table,) = side.world.tables(0).by_group
        params = {"do_remote_decode": True, "transfer_id": self.transfer_id}
        self.request = Prompt(P, list(range(NUM_TOKENS)), params)
        identity = Identity(InstanceId("p"), Incarnation("run"), 1, 1)
        self.scheduler = FerryScheduler(
            identity, side.door, lease_s=30.0, patience_s=60.0, shares_prefixes=True, tokens_per_block=self.size,
            peers=KnownPeers.of([]), early=EarlyTerms(60.0, 1, self.size),
        )  # fmt: skip
        self.worker = FerryWorker(side.ranks[0], lambda tables: tables, self.size)
        self.num_computed = self.num_blocks = 0
        self.scheduler.early.announced(self.request)

    def compute(self, num_tokens):
        """One step; its progress is told with the next one."""
        stop = self.num_computed + num_tokens
        new = self.table[self.num_blocks : ceil_div(stop, self.size)]
        self.num_blocks += len(new)
        scheduled = ScheduledRequest(P, self.num_computed, num_tokens, (tuple(new),) if new else ())
        self.scheduler.early.stepped([scheduled], ())
        self._run()
        self._fill(stop)
        self.num_computed = stop

    def preempt(self):
        """The blocks are another request's in the very step that says so."""
        self.scheduler.early.stepped([], {P})
        self.num_computed = self.num_blocks = 0
        self._run()
        self._fill(0)

    def finish(self):
        kept, _ = self.scheduler.finished(self.request, (tuple(self.table),), complete=True)
        assert kept
        self._run()

    def poll(self):
        self._run()
        return set(self.worker.poll().sent)

    def _run(self):
        orders = self.scheduler.take_orders()
        self.worker.run_now(orders)

    def _fill(self, num_tokens):
        fill(self.side.world, Span(0, num_tokens), 0)
        self.side.push()


def _arrived(d, num_tokens):
    d.step()
    return d.arrived.get((0, "d0")) == num_tokens


@pytest.mark.parametrize("is_resumed_before", [False, True])
def test_a_prompt_that_is_preempted_while_it_is_sent(is_resumed_before):
    """Its load ends with the reason; who asks then waits until it is computed again, and gets all of it, and right."""
    with pair() as (p, d, _):
        engine = Engine(p)
        engine.compute(12)
        engine.compute(8)
        d.order(p, engine.transfer_id)
        wait_for(lambda: _arrived(d, 12), what="what is computed")
        engine.preempt()
        if is_resumed_before:
            engine.compute(16)
        reason = d.outcome().reason
        assert f"gone: preempted: computed=[0, 12) of [0, {NUM_TOKENS})" in reason
        d.order(p, engine.transfer_id, "d1")
        wait_for(lambda: p.ranks[0].status().gauges["parked"], what="an ask that waits: it will come again")
        while engine.num_computed < NUM_TOKENS:
            engine.compute(min(16, NUM_TOKENS - engine.num_computed))
        assert d.arrived.get((0, "d1")) is None, "it is not read again while it is computed"
        d.order(p, engine.transfer_id, "d2")
        engine.finish()
        for name in ("d1", "d2"):
            received = d.outcome(name)
            assert received.ok, received
            assert d.misplaced() == 0
        d.release(p, engine.transfer_id)
        wait_for(lambda: engine.poll() == {P}, what="the end of the offer")
        d.check_clean()
