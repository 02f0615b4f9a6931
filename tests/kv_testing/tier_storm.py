"""A real engine with tiers, stepped by hand: many requests at once on few blocks, some of which go away.

In:  vLLM's `LLM` in this process, prompts, a seed.
Out: what every request has answered, and what has happened meanwhile (`Storm.seen`).
Law: it ends at rest, or `AssertionError` says what is still open: no block of the device in use but the one that holds
     nothing, no job, no host slot held, nothing known of a request that has ended.

Copies between device and host are made slow, so that requests come, go and are preempted while some are open.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from kv_testing.answers import Answer, Prompt

MAX_STEPS = 20_000
TOP = 5
PAUSES_S = (0.0, 0.02, 0.06)
"""Before a copy, one of these."""


class Asked(NamedTuple):
    """A request of a storm: which prompt, for how many tokens, and whether its client goes away."""

    prompt: int
    num_tokens: int
    leaves: bool


class Said(NamedTuple):
    """What a request has answered until it ended, or its client left."""

    asked: Asked
    answer: Answer
    num_cached: int


class Storm:
    """One engine in a storm."""

    def __init__(self, engine: Any, seed: int, *, pauses_s: Sequence[float] = PAUSES_S) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.engine, self.dice, self.pauses_s = engine.llm_engine, random.Random(seed), pauses_s
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.tiers: Any = self.scheduler.connector._tiers
        self.memory: Any = get_kv_transfer_group()._tier_worker._memory  # type: ignore[attr-defined]
        self.seen: Counter[str] = Counter()
        self.open: dict[str, Asked] = {}
        self.said: list[Said] = []
        self.last: dict[str, Any] = {}

    def play(self, prompts: Sequence[Prompt], asked: Sequence[Asked], num_at_once: int = 8) -> list[Said]:
        """Ask all of it, so many at once."""
        waiting = list(asked)
        with self.slow_copies():
            while waiting or self.open:
                while waiting and len(self.open) < num_at_once and self.dice.random() < 0.5:
                    self.ask(prompts, waiting.pop(0))
                self.step()
                if self.dice.random() < 0.3:
                    self._leave()
        self.settle()
        return self.said

    def ask(self, prompts: Sequence[Prompt], asked: Asked) -> str:
        """Begin a request; its name."""
        name = f"storm {self.seen['asked']}"
        self.seen["asked"] += 1
        self.open[name] = asked
        self.engine.add_request(name, {"prompt_token_ids": list(prompts[asked.prompt])}, _sampling(asked))
        return name

    def step(self) -> None:
        """One step of the engine, and what is seen of it."""
        self.seen["steps"] += 1
        assert self.seen["steps"] < MAX_STEPS, f"no end: {self.report()}"
        before = {name: request.num_preemptions for name, request in self.scheduler.requests.items()}
        is_saving, is_loading = len(self.tiers._leases) > 0, bool(self.tiers.prefixes._loading)
        for output in self.engine.step():
            self.last[output.request_id] = output
            if output.finished:
                self._said(output.request_id)
        loading = self.tiers.prefixes._loading
        for name, request in self.scheduler.requests.items():
            if request.num_preemptions > before.get(name, 0):
                self.seen["preemptions"] += 1
                self.seen["preemptions while others load"] += is_loading
                self.seen["preemptions while others are saved"] += is_saving
            self.seen["steps in which preempted ones load"] += name in loading and request.num_preemptions > 0
        self.seen["steps while saving"] += is_saving
        self.tiers.prefixes.check()

    def settle(self, timeout_s: float = 60.0) -> None:
        """Step until nothing is open, and see that nothing is kept."""
        until = time.monotonic() + timeout_s
        while self.tiers.prefixes.gauges()["tier_jobs"] or self.scheduler.has_requests():
            assert time.monotonic() < until, f"still open: {self.report()}"
            if not self.scheduler.has_requests():
                # An engine in its caller's process steps for requests alone.
                self.seen["ticks"] += 1
                tick, one = f"tick {self.seen['ticks']}", _sampling(Asked(0, 1, leaves=False))
                self.engine.add_request(tick, {"prompt_token_ids": [16, 17]}, one)
            self.engine.step()
        assert not (held := {name: number for name, number in self.report().items() if number}), held

    def report(self) -> dict[str, int]:
        """What is open or kept; all of it 0 at rest."""
        pool, tiers = self.scheduler.kv_cache_manager.block_pool, self.tiers.prefixes
        tiers.check()
        kept = ("_questions", "_wishes", "_begun", "_loading", "_failed", "_copying")
        return {
            "requests": len(self.scheduler.requests),
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "leases": len(self.tiers._leases),
            "jobs": int(tiers.gauges()["tier_jobs"]),
            "slots": int(tiers.gauges()["tier_slots_held"]),
            **{name: len(getattr(tiers, name)) for name in kept},
        }

    def _said(self, name: str) -> None:
        output, asked = self.last.pop(name), self.open.pop(name)
        (answer,) = output.outputs
        self.said.append(Said(asked, answer_of(answer), output.num_cached_tokens or 0))

    def _leave(self) -> None:
        """A client goes away, whatever its request does now."""
        leaving = [name for name, asked in self.open.items() if asked.leaves]
        if not leaving:
            return
        gone = self.dice.choice(leaving)
        loading = {request.rpartition("-")[0] for request in self.tiers.prefixes._loading}
        self.seen["left while loading"] += gone in loading
        self.seen["left while others are saved"] += len(self.tiers._leases) > 0
        self.seen["left"] += 1
        self.engine.abort_request([gone])
        if gone in self.last:
            self._said(gone)
        self.open.pop(gone, None)

    @contextmanager
    def spoilt(self) -> Iterator[None]:
        """While this lasts, the keys that are loaded are not those that were saved."""
        load, planes = self.memory.load, self.memory.caches.planes[::2]

        def spoilt(tokens: Any, slots: Sequence[int], *more: Any) -> None:
            for keys in planes:
                keys[list(slots)] *= -1
            load(tokens, slots, *more)
            for keys in planes:
                keys[list(slots)] *= -1

        self.memory.load = spoilt
        try:
            yield
        finally:
            self.memory.load = load

    @contextmanager
    def slow_copies(self) -> Iterator[None]:
        """While this lasts."""
        save, load = self.memory.save, self.memory.load
        self.memory.save, self.memory.load = self._slow(save), self._slow(load)
        try:
            yield
        finally:
            self.memory.save, self.memory.load = save, load

    def _slow(self, copy: Callable[..., None]) -> Callable[..., None]:
        dice = random.Random(self.dice.random())

        def slowly(*arguments: Any) -> None:
            time.sleep(dice.choice(self.pauses_s))
            copy(*arguments)

        return slowly


def answer_of(output: Any) -> Answer:
    """Tokens, and for each the best log-probabilities."""
    steps = zip(output.logprobs, output.token_ids, strict=True)
    best = [
        dict(sorted(((t, p.logprob) for t, p in step.items()), key=lambda item: -item[1])[:TOP]) for step, _ in steps
    ]
    return Answer(tuple(output.token_ids), tuple(best))


def _sampling(asked: Asked, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=asked.num_tokens, temperature=0, logprobs=TOP, detokenize=False, ignore_eos=True, **more
    )


def alone(engine: Any, prompts: Sequence[Prompt], num_tokens: int) -> list[Answer]:
    """What each prompt is answered by itself, sharing nothing with anybody."""
    sampling, found = _sampling(Asked(0, num_tokens, leaves=False)), []
    for number, prompt in enumerate(prompts):
        asked = {"prompt_token_ids": list(prompt), "cache_salt": f"alone {number} {time.monotonic()}"}
        (answer,) = engine.generate([asked], sampling, use_tqdm=False)
        assert not answer.num_cached_tokens, "a salt of its own shares nothing"
        found.append(answer_of(answer.outputs[0]))
    return found


def answer_to(engine: Any, prompt: Prompt, num_tokens: int) -> tuple[Answer, int]:
    """The answer, and how many tokens of the prompt were not computed for it."""
    sampling = _sampling(Asked(0, num_tokens, leaves=False))
    (answer,) = engine.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)
    return answer_of(answer.outputs[0]), answer.num_cached_tokens or 0


def storm(
    engine: Any, prompts: Sequence[Prompt], asked: Sequence[Asked], seed: int, spoilt: bool = False
) -> tuple[list[Said], dict[str, int]]:
    """A storm from its beginning to its end. If `spoilt`, what is loaded is not what was saved."""
    found = Storm(engine, seed)
    before = Counter(found.tiers.prefixes.counts)
    with found.spoilt() if spoilt else nullcontext():
        said = found.play(prompts, asked)
    return said, dict(found.seen + (Counter(found.tiers.prefixes.counts) - before))
