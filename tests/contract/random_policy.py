"""Random scenarios of the eviction order alone, with the seed's answers as expectations.

In:  a number.
Out: a case whose target is `eviction_policy`.
Law: only free blocks are claimed and only claimed ones released; every answer is that of the naive order.
"""

from random import Random
from typing import Any

from contract.case import Case
from contract.naive_policy import naive_policy

Step = dict[str, Any]
KINDS = (
    "ask",
    "ask",
    "claim",
    "claim",
    "release",
    "release",
    "time",
    "time",
    "refresh",
    "refresh",
    "priority",
    "count",
)


def random_policy(number: int) -> Case:
    """The scenario of this number, always the same."""
    random = Random(f"policy {number}")
    config = {
        "target": "eviction_policy",
        "num_primary_blocks": random.randint(1, 3),
        "num_secondary_blocks": random.randint(0, 2),
        "secondary_offload_min_priority": random.choice([None, None, 36, 0]),
    }
    steps: list[Step] = []
    for _ in range(random.randint(10, 50)):
        state = naive_policy(config, steps, False)
        steps.append(_answered(config, state, _a_step(random, config, state)))
    return Case("random", {"name": f"random-policy-{number}", "kind": "scenario", "config": config, "steps": steps})


def _a_step(random: Random, config: Step, state: dict[str, Any]) -> Step:
    count = config["num_primary_blocks"] + config["num_secondary_blocks"]
    free = state["queued"]
    held = [block_id for block_id in range(count) if block_id not in free]
    kind = random.choice(KINDS)
    if kind == "claim" and free:
        return {"op": "claim_block", "block_id": random.choice(free)} | _a_wish(random)
    if kind == "release" and held:
        step: Step = {"op": "release_block", "block_id": random.choice(held)}
        return step | ({"to_front": random.random() < 0.5} if random.random() < 0.5 else {})
    if kind == "time":
        return {"op": "set_time_ms", "ms": state["now"] + random.choice([1, 5, 20])}
    if kind == "refresh":
        return {"op": "refresh"}
    if kind == "priority":
        return {"op": "get_block_priority", "block_id": random.randrange(count)}
    return {"op": "get_num_free_blocks" if kind == "count" else "get_free_block", "level": random.choice([0, 0, 1])}


def _a_wish(random: Random) -> Step:
    wish: Step = {}
    if random.random() < 0.6:
        wish["priority"] = random.choice([0, 10, 35, 80])
    if wish and random.random() < 0.8:
        wish["duration_ms"] = random.choice([3, 10])
    return wish


def _answered(config: Step, state: dict[str, Any], step: Step) -> Step:
    if step["op"] == "get_block_priority":
        return step | {"expect": {"value": state["priorities"][step["block_id"]]}}
    if step["op"] == "get_num_free_blocks":
        return step | {"expect": {"value": state["free"][step["level"]]}}
    if step["op"] == "get_free_block":
        victim = state["victims"][step["level"]]
        if victim is None:
            return step | {"expect_error": True}
        return step | {"expect": {"block_id": victim, "can_offload": state["can_offload"][step["level"]]}}
    return step
