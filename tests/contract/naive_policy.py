"""The eviction order as lists, for rules that need to know what the seed would do and what we do.

In:  the config of a policy case and the steps before a question.
Out: priorities, victims and free counts then.
Law: obviously right, not fast: queues are lists, time is compared on each refresh.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Block:
    block_id: int
    level: int
    priority: int = 35
    duration_ms: int | None = None
    expires_at: int | None = None


def naive_policy(config: dict[str, Any], past: list[dict[str, Any]], keeps_duration: bool) -> dict[str, Any]:
    """State after `past`. With `keeps_duration` a claim without a priority leaves the duration as it is (D38)."""
    levels = [0] * config["num_primary_blocks"] + [1] * config["num_secondary_blocks"]
    blocks = [_Block(block_id, level) for block_id, level in enumerate(levels)]
    queue, now = list(blocks), 0
    for step in past:
        block = blocks[step["block_id"]] if "block_id" in step else None
        if step["op"] == "set_time_ms":
            now = step["ms"]
        elif step["op"] == "claim_block" and block is not None:
            _claim(block, queue, step, keeps_duration)
        elif step["op"] == "release_block" and block is not None:
            queue.insert(0 if step.get("to_front", False) else len(queue), block)
            if block.duration_ms is not None and block.priority != 35:
                block.expires_at = now + block.duration_ms
        elif step["op"] == "refresh":
            _refresh(queue, now)
    victims = {level: _victim(queue, level) for level in (0, 1)}
    free = {level: sum(one.level == level for one in queue) for level in (0, 1)}
    threshold = config.get("secondary_offload_min_priority")
    least = 30 if threshold is None else threshold
    return {
        "priorities": [one.priority for one in blocks],
        "victims": victims,
        "can_offload": {
            level: level == 0 and victim is not None and blocks[victim].priority >= least
            for level, victim in victims.items()
        },
        "free": free,
        "queued": [one.block_id for one in queue],
        "now": now,
    }


def _claim(block: _Block, queue: list[_Block], step: dict[str, Any], keeps_duration: bool) -> None:
    if block in queue:
        queue.remove(block)
    block.expires_at = None
    if "priority" in step or not keeps_duration:
        block.duration_ms = step.get("duration_ms")
    block.priority = step.get("priority", block.priority)


def _refresh(queue: list[_Block], now: int) -> None:
    due = [one for one in queue if one.expires_at is not None and one.expires_at <= now]
    for block in sorted(due, key=lambda one: one.expires_at or 0):
        block.priority, block.expires_at, block.duration_ms = 35, None, None
        queue.remove(block)
        queue.append(block)


def _victim(queue: list[_Block], level: int) -> int | None:
    """The lowest priority, then the first in the queue."""
    found = [one for one in queue if one.level == level]
    return min(found, key=lambda one: one.priority).block_id if found else None
