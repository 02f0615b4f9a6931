"""What the connector costs an engine's scheduler, in processor time of its thread.

In:  how many requests wait; tokens of their prompts; of a new prompt.
Out: a table; the last line is one JSON object with `claim`, `ours`, `theirs` (the most we allow ourselves), `ratio`.
Law: a step asks for every waiting request, takes the orders and the report, as an engine does; the door is a real one,
     with its thread and socket. Nothing that vLLM does by itself is counted.

    python tools/bench/scheduler.py [--waiting 256] [--tokens 4000] [--new 14000] [--steps 200]
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import thread_time_ns

from kv_core.ids import Incarnation, InstanceId, RequestId
from kv_core.keys import BlockKey, Scope, prompt_key
from kv_engine_adapter.known_peers import KnownPeers
from kv_engine_adapter.scheduler import FerryScheduler, Identity
from kv_transfer.config import TransferConfig
from kv_transfer.instance import InstanceDoor

MOST_STEP_MS, MOST_NEW_MS = 0.2, 1.0
VOCABULARY = 128_000
PEER = "127.0.0.1"


@dataclass
class Request:
    """A request as the scheduler side reads it."""

    request_id: RequestId
    tokens: Sequence[int]
    params: Mapping[str, object] | None
    family: str = "call"
    is_rejected: bool = False
    needs_every_token: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)

    def prompt_key(self) -> BlockKey | str:
        return prompt_key(self.tokens, Scope())


def request(number: int, num_tokens: int, first: int) -> Request:
    """Decode request `number`; prompts with another first token are other prompts."""
    tokens = [(first + 7 * place) % VOCABULARY for place in range(num_tokens)]
    params = {
        "do_remote_prefill": True,
        "transfer_id": f"{number:032x}",
        "remote_host": PEER,
        "remote_port": 1,
        "remote_incarnation": "run",
    }
    return Request(RequestId(f"request-{number}"), tokens, params)


def scheduler_of(door: InstanceDoor) -> FerryScheduler:
    identity = Identity(InstanceId("engine"), Incarnation("run"), tensor_ranks=1, pipeline_stages=1)
    return FerryScheduler(
        identity,
        door,
        lease_s=30,
        patience_s=60,
        shares_prefixes=True,
        tokens_per_block=16,
        peers=KnownPeers.of([PEER]),
    )


def milliseconds(run: Callable[[], object]) -> float:
    began = thread_time_ns()
    run()
    return (thread_time_ns() - began) / 1e6


def step(scheduler: FerryScheduler, waiting: Sequence[Request]) -> None:
    """Every hook that an engine calls in a step in which it has room for nobody."""
    for each in waiting:
        scheduler.num_external_tokens(each, 0)
    scheduler.take_orders()
    scheduler.workers_report({"rank0": {"sessions": 1.0}})
    scheduler.take_report()
    scheduler.has_work()


def measure(waiting: int, tokens: int, new: int, steps: int) -> dict[str, float]:
    """Milliseconds, medians."""
    config = TransferConfig()
    door = InstanceDoor(config, InstanceId("engine"), Incarnation("run"))
    found = {}
    try:
        scheduler = scheduler_of(door)
        others = [request(number, tokens, first=number) for number in range(waiting)]
        step(scheduler, others)
        found[f"step, {waiting} waiting"] = median(milliseconds(lambda: step(scheduler, others)) for _ in range(steps))
        scheduler = scheduler_of(door)
        twins = [request(number, tokens, first=0) for number in range(waiting)]
        wanted = scheduler.num_external_tokens(twins[0], 0)
        assert wanted == tokens - 1
        scheduler.allocated(twins[0], (tuple(range(tokens // 16 + 1)),), wanted)
        step(scheduler, twins[1:])
        assert scheduler.num_external_tokens(twins[1], 0) is None, "an equal prompt is loading"
        found[f"step, {waiting} waiting for one load"] = median(
            milliseconds(lambda: step(scheduler, twins[1:])) for _ in range(steps)
        )
        fresh = [request(waiting + number, new, first=number) for number in range(30)]
        found[f"new prompt of {new} tokens"] = median(
            milliseconds(lambda each=each: scheduler.num_external_tokens(each, 0))  # type: ignore[misc]
            for each in fresh
        )
        found["asked again"] = median(
            milliseconds(lambda: scheduler.num_external_tokens(fresh[0], 0)) for _ in range(200)
        )
    finally:
        door.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--new", type=int, default=14_000)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    found = measure(options.waiting, options.tokens, options.new, options.steps)
    for name, spent in found.items():
        print(f"{name:40} {spent:8.4f} ms")
    most = [MOST_NEW_MS if name.startswith("new") else MOST_STEP_MS for name in found]
    ratio = min(allowed / spent for allowed, spent in zip(most, found.values(), strict=True))
    claim = f"a step costs at most {MOST_STEP_MS} ms, a new prompt {MOST_NEW_MS} ms"
    print(json.dumps({"claim": claim, "ours": found, "theirs": most, "ratio": round(ratio, 2), "unit": "ms"}))


if __name__ == "__main__":
    main()
