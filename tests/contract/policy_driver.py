"""Operations of the cases on our eviction order alone, one run for each block.

In:  steps of a scenario whose target is `eviction_policy`.
Out: the fields that the cases may expect of each.
Law: the queues are those of the manager. A claim does what a request's wish does there: a wish without a priority
     leaves priority and duration as they are.
"""

from array import array
from typing import Any

from contract.case import UnknownKind
from contract.notnow import NotNow
from kv_core.config import Order
from kv_core.eviction import Expiries, Stamps, victim_queue
from kv_core.retention import DEFAULT_PRIORITY
from kv_core.runs import Run

Step = dict[str, Any]
Answer = dict[str, Any]


class PolicyDriver:
    """Blocks of two levels, all free at first."""

    goes_on = True

    def __init__(self, config: dict[str, Any]) -> None:
        threshold = config.get("secondary_offload_min_priority")
        self._threshold = 30 if threshold is None else threshold
        self._now_ms = 0
        stamps = Stamps()
        counts = (config["num_primary_blocks"], config["num_secondary_blocks"])
        self._queues = [victim_queue(Order.LRU, stamps, leaf_first=False, num_blocks=count) for count in counts]
        self._expiries = Expiries(lambda: self._now_ms)
        levels = [0] * config["num_primary_blocks"] + [1] * config["num_secondary_blocks"]
        self._runs = [self._free_run(block_id, level) for block_id, level in enumerate(levels)]

    def _free_run(self, block_id: int, level: int) -> Run:
        run = Run(None, 0, b"", array("i", [block_id]))
        run.tier = level
        self._queues[level].release(run)
        return run

    def call(self, step: Step) -> Answer:
        operation = getattr(self, f"op_{step['op']}", None)
        if operation is None:
            raise UnknownKind(f"operation {step['op']!r}")
        answer: Answer = operation(step) or {}
        return answer

    def known(self, step: Step) -> dict[str, Any]:
        return {}

    def op_get_free_block(self, step: Step) -> Answer:
        run = self._queues[step["level"]].peek()
        if run is None:
            raise NotNow("get_free_block")
        return {"block_id": run.ids[-1], "can_offload": step["level"] == 0 and run.priority >= self._threshold}

    def op_claim_block(self, step: Step) -> Answer:
        run = self._runs[step["block_id"]]
        if run.stamp is not None:
            self._queues[run.tier].claim(run)
        run.expires_at = None
        if "priority" in step:
            run.priority, run.duration_ms = step["priority"], step.get("duration_ms")
        return {}

    def op_release_block(self, step: Step) -> Answer:
        run = self._runs[step["block_id"]]
        self._queues[run.tier].release(run, front=step.get("to_front", False))
        self._expiries.released(run)
        return {}

    def op_set_time_ms(self, step: Step) -> Answer:
        self._now_ms = step["ms"]
        return {}

    def op_refresh(self, step: Step) -> Answer:
        for run in self._expiries.due():
            run.priority, run.duration_ms = DEFAULT_PRIORITY, None
            self._queues[run.tier].claim(run)
            self._queues[run.tier].release(run)
        return {}

    def op_get_block_priority(self, step: Step) -> Answer:
        return {"value": self._runs[step["block_id"]].priority}

    def op_get_num_free_blocks(self, step: Step) -> Answer:
        return {"value": self._queues[step["level"]].num_free}

    def op_verify_queue_integrity(self, step: Step) -> Answer:
        free = [run for level, queue in enumerate(self._queues) for run in queue if run.tier == level]
        return {"ok": len(free) == sum(queue.num_free for queue in self._queues)}
