"""What the connector costs an engine's scheduler, in processor time of its thread.

In:  how many requests wait; tokens of their prompts; of a new prompt.
Out: a table; the last line is one JSON object with `claim`, `ours`, `theirs` (the most we allow ourselves), `ratio`.
Law: a step asks `FerryConnector` for every waiting request of vLLM, and calls each hook that an engine calls once a
     step; the door is a real one, with its thread and socket. Nothing that vLLM does by itself is counted.

    python tools/bench/scheduler.py [--waiting 256] [--tokens 4000] [--new 14000] [--steps 200]

Needs vLLM, no engine. Which requests wait: some that no connector has anything to do with (no parameters), prefill
requests that will be offered, decode requests that load, and decode requests that all wait for one load.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from time import thread_time_ns
from types import SimpleNamespace

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kv_core.ids import Incarnation, InstanceId
from kv_engine_adapter.idle import IdleSteps
from kv_engine_adapter.known_peers import KnownPeers
from kv_engine_adapter.scheduler import FerryScheduler, Identity
from kv_engine_adapter.tier_terms import BreakEven, TierTerms
from kv_engine_adapter.vllm.connector import FerryConnector
from kv_engine_adapter.vllm.groups import ModelCaches
from kv_engine_adapter.vllm.tiers import SchedulerTiers
from kv_engine_adapter.vllm.window_blocks import WindowBlocks
from kv_transfer.config import TransferConfig
from kv_transfer.instance import InstanceDoor

MOST_STEP_MS, MOST_NEW_MS = 0.2, 1.0
VOCABULARY = 128_000
BLOCK = 16
PEER = "127.0.0.1"
TIERS = TierTerms(
    tokens_per_block=BLOCK, num_slots=1000, bytes_per_token=10, max_tokens=16_000, num_ranks=1,
    break_even=BreakEven(1.0, 0.0, 0.0),
)  # fmt: skip

Params = Callable[[int], Mapping[str, object] | None]


def loads(number: int) -> Mapping[str, object]:
    return {
        "do_remote_prefill": True,
        "transfer_id": f"{number:032x}",
        "remote_host": PEER,
        "remote_port": 1,
        "remote_incarnation": "run",
    }


def offers(_: int) -> Mapping[str, object]:
    return {"do_remote_decode": True}


def nothing(_: int) -> None:
    return None


def request(number: int, num_tokens: int, first: int, params: Params = loads) -> Request:
    """Request `number` of vLLM; prompts with another first token are other prompts."""
    tokens = [(first + 7 * place) % VOCABULARY for place in range(num_tokens)]
    extra = None if (given := params(number)) is None else {"kv_transfer_params": given}
    return Request(f"request-{number}", tokens, SamplingParams(max_tokens=8, extra_args=extra), None)


def scheduler_of(door: InstanceDoor) -> FerryScheduler:
    identity = Identity(InstanceId("engine"), Incarnation("run"), tensor_ranks=1, pipeline_stages=1)
    return FerryScheduler(
        identity,
        door,
        lease_s=30,
        patience_s=60,
        shares_prefixes=True,
        tokens_per_block=BLOCK,
        peers=KnownPeers.of([PEER]),
    )


@contextmanager
def connector_of(*, has_tiers: bool) -> Iterator[FerryConnector]:
    """The scheduler's half of a connector, without an engine around it."""
    door = InstanceDoor(TransferConfig(), InstanceId("engine"), Incarnation("run"))
    connector = object.__new__(FerryConnector)
    connector._scheduler = scheduler_of(door)
    connector._worker = connector._tier_worker = None
    connector._windows = WindowBlocks(ModelCaches(2, 64, BLOCK))
    connector._idle = IdleSteps(is_alone=True)
    connector._tiers = SchedulerTiers(TIERS) if has_tiers else None
    try:
        yield connector
    finally:
        door.close()


def milliseconds(run: Callable[[], object]) -> float:
    began = thread_time_ns()
    run()
    return (thread_time_ns() - began) / 1e6


def step(connector: FerryConnector, waiting: Sequence[Request]) -> None:
    """Every hook that an engine calls in a step in which it has room for nobody."""
    for each in waiting:
        connector.get_num_new_matched_tokens(each, 0)
    connector.build_connector_meta(SchedulerOutput.make_empty())
    connector.update_connector_output(KVConnectorOutput())
    connector.get_kv_connector_stats()
    connector.has_pending_push_work()
    connector.has_pending_block_frees()


def steps_of(waiting: Sequence[Request], steps: int, *, has_tiers: bool) -> float:
    with connector_of(has_tiers=has_tiers) as connector:
        for each in waiting:
            connector.on_new_request(each)
        step(connector, waiting)
        return median(milliseconds(lambda: step(connector, waiting)) for _ in range(steps))


def steps_of_twins(twins: Sequence[Request], steps: int, *, has_tiers: bool) -> float:
    """All but the first wait for its load of the same prompt."""
    with connector_of(has_tiers=has_tiers) as connector:
        first, *others = twins
        wanted = first.num_prompt_tokens - 1
        assert connector.get_num_new_matched_tokens(first, 0) == (wanted, True)
        blocks = list(range(first.num_prompt_tokens // BLOCK + 1))
        connector.update_state_after_alloc(first, SimpleNamespace(get_block_ids=lambda: (blocks,)), wanted)
        step(connector, others)
        assert connector.get_num_new_matched_tokens(others[0], 0)[0] is None, "an equal prompt is loading"
        return median(milliseconds(lambda: step(connector, others)) for _ in range(steps))


def measure(waiting: int, tokens: int, new: int, steps: int) -> dict[str, float]:
    """Milliseconds, medians."""
    found = {}
    for has_tiers in (False, True):
        where = ", host tier" if has_tiers else ""
        for kind in (nothing, offers, loads):
            others = [request(number, tokens, number, kind) for number in range(waiting)]
            found[f"step, {waiting} waiting: {kind.__name__}{where}"] = steps_of(others, steps, has_tiers=has_tiers)
        twins = [request(number, tokens, first=0) for number in range(waiting)]
        found[f"step, {waiting} waiting: one load{where}"] = steps_of_twins(twins, steps, has_tiers=has_tiers)
        with connector_of(has_tiers=has_tiers) as connector:
            fresh = [request(waiting + number, new, first=number) for number in range(30)]
            found[f"new prompt of {new} tokens{where}"] = median(
                milliseconds(lambda each=each: connector.get_num_new_matched_tokens(each, 0))  # type: ignore[misc]
                for each in fresh
            )
            found[f"asked again{where}"] = median(
                milliseconds(lambda each=each: connector.get_num_new_matched_tokens(each, 0))  # type: ignore[misc]
                for each in fresh * 7
            )
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
        print(f"{name:48} {spent:8.4f} ms")
    most = [MOST_NEW_MS if name.startswith("new") else MOST_STEP_MS for name in found]
    ratio = min(allowed / spent for allowed, spent in zip(most, found.values(), strict=True))
    claim = f"a step costs at most {MOST_STEP_MS} ms, a new prompt {MOST_NEW_MS} ms"
    print(json.dumps({"claim": claim, "ours": found, "theirs": most, "ratio": round(ratio, 2), "unit": "ms"}))


if __name__ == "__main__":
    main()
