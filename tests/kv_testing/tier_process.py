"""One vLLM engine with tiers in a process of its own, asked over a pipe, harmed and looked at from inside.

In:  a checkpoint and the connector's settings.
Out: answers, with how many tokens of the prompt were not computed for them; what the tiers have counted.
Law: `with running_engine(...)` leaves no process behind.
"""

import multiprocessing
import os
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

Answered = TypeVar("Answered")
START_S = 300.0
ANSWER_S = 120.0
LONG_ANSWER_S = 600.0
BLOCK = 32
NUM_BLOCKS = 33
"""Of the device: one that holds nothing, and room for one prompt of a thousand tokens."""

NOISE = 1e-3
"""Of a log-probability: tokens in other batches are added in another order."""


class Answer(NamedTuple):
    """Tokens, their log-probabilities, and how many tokens of the prompt came from a cache."""

    tokens: tuple[int, ...]
    best: tuple[float, ...]
    num_cached: int


def prompts(name: str, number: int, num_tokens: int) -> list[tuple[int, ...]]:
    """Prompts that nobody else asks."""
    dice = random.Random(name)
    return [tuple(dice.choice(range(16, 500)) for _ in range(num_tokens)) for _ in range(number)]


def same(ours: Answer, theirs: Answer) -> bool:
    """Equal tokens, and log-probabilities that differ by no more than their order of adding."""
    moves = [abs(one - other) for one, other in zip(ours.best, theirs.best, strict=True)]
    return ours.tokens == theirs.tokens and max(moves) < NOISE


class TierProcess:
    """The test's handle of an engine."""

    def __init__(
        self, model: Path, settings: dict[str, Any], policy: str, event_port: int | None, more: dict[str, Any]
    ) -> None:
        self.settings = settings
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(model), settings, policy, event_port, more))
        self._process.start()
        theirs.close()
        assert self._take(START_S) == "ready"

    def ask(self, prompt: tuple[int, ...], num_tokens: int = 17, **arguments: Any) -> Answer:
        """Answer a prompt; `arguments` are the request's extra ones."""
        self._pipe.send(("ask", prompt, num_tokens, arguments))
        return Answer(*self._take(ANSWER_S))

    def counts(self) -> dict[str, int]:
        """What the tiers have counted, the store's own words for misses included."""
        self._pipe.send(("counts",))
        return dict(self._take(ANSWER_S))

    def harm(self, prompt: tuple[int, ...], block: int, group: int | None = None) -> None:
        """Turn the sign of all keys of a block that the host tier holds; of one cache group's layers alone if told."""
        self._pipe.send(("harm", prompt, block, group))
        assert self._take(ANSWER_S) == "done"

    def forget(self) -> None:
        """Reset the engine's prefix cache and the tiers."""
        self._pipe.send(("forget",))
        assert self._take(ANSWER_S) is True

    def do(self, what: Callable[..., Answered], *asked: Any) -> Answered:
        """Call this with the engine, there; what it raises is raised here."""
        self._pipe.send(("do", what, *asked))
        failed, told = self._take(LONG_ANSWER_S)
        if failed:
            raise AssertionError(f"in the engine's process:\n{told}")
        return cast("Answered", told)

    def close(self) -> None:
        """End the engine, with force if need be."""
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(20)
        self._process.kill()
        self._process.join()

    def _take(self, timeout_s: float) -> Any:
        assert self._pipe.poll(timeout_s), f"the engine says nothing for {timeout_s} s"
        return self._pipe.recv()


@contextmanager
def running_engine(
    model: Path, settings: dict[str, Any], policy: str = "fail", event_port: int | None = None, **more: Any
) -> Iterator[TierProcess]:
    """An engine of few blocks with these settings of the connector, what it does about failed loads, and its events.

    `more` are arguments of vLLM's own.
    """
    engine = TierProcess(model, settings, policy, event_port, more)
    try:
        yield engine
    finally:
        engine.close()


def _serve(
    pipe: Connection, model: str, settings: dict[str, Any], policy: str, event_port: int | None, more: dict[str, Any]
) -> None:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    events = None
    if event_port is not None:
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{event_port}")
    usual = {"max_model_len": 1024, "num_gpu_blocks_override": NUM_BLOCKS}
    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK,
        dtype="float32",
        **(usual | more),
        kv_transfer_config=KVTransferConfig(
            kv_connector="FerryConnector",
            kv_connector_module_path="kv_engine_adapter.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=settings,
        ),
        kv_events_config=events,
    )
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        pipe.send(_obey(engine, *order))


def _obey(engine: Any, order: str, *asked: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kv_core.keys import Scope

    tiers = engine.llm_engine.engine_core.engine_core.scheduler.connector._tiers.prefixes
    worker: Any = get_kv_transfer_group()
    if order == "ask":
        return _ask(engine, *asked)
    if order == "do":
        return _done(engine, *asked)
    if order == "counts":
        return {**tiers.counts, **worker._tier_worker.disk_counts(), "open": tiers.gauges()["tier_jobs"]}
    if order == "forget":
        return engine.reset_prefix_cache(reset_connector=True)
    prompt, block, group = asked
    slot, caches = tiers._slots.find(prompt, Scope()).slots[block], worker._tier_worker._memory.caches
    for layer, keys in enumerate(caches.planes[:: caches.num_planes]):
        if group is None or caches.groups[layer] == group:
            keys[slot].neg_()
    return "done"


def _done(engine: Any, what: Callable[..., Any], *asked: Any) -> tuple[bool, Any]:
    """Whether it failed, and the answer or why."""
    try:
        return False, what(engine, *asked)
    except Exception:
        return True, traceback.format_exc()


def _ask(engine: Any, prompt: tuple[int, ...], num_tokens: int, arguments: dict[str, Any]) -> tuple[Any, ...]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=num_tokens, temperature=0, logprobs=1, detokenize=False, ignore_eos=True, extra_args=arguments
    )
    answer = engine.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)[0]
    (output,) = answer.outputs
    best = tuple(step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True))
    return tuple(output.token_ids), best, answer.num_cached_tokens
