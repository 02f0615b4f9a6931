"""Real engines on two GPUs: what pipeline and tensor parallel engines hand over is answered as one engine answers it.

The engine that answers is also the one it is compared with, asked without a hand-over and without its prefix cache. All
engines start together, once for all tests, since each takes more than a minute.
"""

import json
import multiprocessing
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from model.make_tiny import make_tiny

from kv_testing.answers import PREFILL_PARAMS, Answer

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

TOLERANCE = 0.03
"""Of log-probabilities in float16: two ranks round their partial sums otherwise than one. Bfloat16, which rounds eight
times as coarsely, moved them by more than 0.08. A hand-over that goes wrong moves some by more than `MOVED`."""
MOVED = 0.3
START_S = 240.0
LENGTHS = (1, 15, 16, 17, 333)


@dataclass(frozen=True)
class Shape:
    """Tensor ranks, pipeline stages, and the GPUs they are on."""

    tp: int
    pp: int
    gpus: str

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}"


TP1, TP2, PP2 = Shape(1, 1, "1"), Shape(2, 1, "0,1"), Shape(1, 2, "0,1")


def serve(pipe: Connection, shape: Shape, model: str, settings: dict[str, Any]) -> None:
    """One engine: answers (tokens, parameters) until it is told None; "forget" empties its prefix cache."""
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": shape.gpus,
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        tensor_parallel_size=shape.tp,
        pipeline_parallel_size=shape.pp,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=1 << 30,
        dtype="float16",
        kv_transfer_config=KVTransferConfig(
            kv_connector="FerryConnector",
            kv_connector_module_path="kv_engine_adapter.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config=settings,
        ),
    )
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        if asked == "forget":
            pipe.send(engine.reset_prefix_cache())
            continue
        tokens, parameters, num_tokens = asked
        extra = {"kv_transfer_params": parameters} if parameters else None
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=0, logprobs=5, detokenize=False, ignore_eos=True, extra_args=extra
        )
        answer = engine.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)[0]
        best = [{token: found.logprob for token, found in step.items()} for step in answer.outputs[0].logprobs]
        pipe.send((tuple(answer.outputs[0].token_ids), best, answer.kv_transfer_params, answer.num_cached_tokens))


class Engine:
    """The test's handle of one engine."""

    def __init__(self, shape: Shape, model: Path, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, shape, str(model), settings))
        self._process.start()
        theirs.close()

    def wait(self) -> Self:
        assert self._pipe.poll(START_S), "the engine does not start"
        assert self._pipe.recv() == "ready"
        return self

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        """What the prefill engine tells the decode engine."""
        return dict(self._ask(tokens, dict(PREFILL_PARAMS), 1)[2])

    def answer(self, tokens: list[int], parameters: dict[str, Any] | None = None) -> tuple[Answer, int]:
        """The answer, and how many tokens of the prompt were not computed for it."""
        found, best, _, num_cached = self._ask(tokens, parameters, 8)
        return Answer(found, tuple(best)), num_cached

    def forget(self) -> None:
        self._pipe.send("forget")
        assert self._pipe.recv() is not False

    def _ask(self, *asked: Any) -> Any:
        self._pipe.send(asked)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(20)
        self._process.kill()


Engines = dict[str, Engine]
"""By shape; those named "staged" do without the direct path."""


@pytest.fixture(scope="module")
def hooks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hooks")


@pytest.fixture(scope="module")
def engines(hooks: Path) -> Iterator[Engines]:
    """None measures the memory that is free, so they may start together."""
    model, staged = make_tiny(0), {"direct": False, "test_hooks_dir": str(hooks)}
    started = {str(shape): Engine(shape, model, {}) for shape in (TP1, TP2, PP2)}
    started |= {f"staged {shape}": Engine(shape, model, staged) for shape in (TP1, TP2)}
    try:
        for engine in started.values():
            engine.wait()
        yield started
    finally:
        for engine in started.values():
            engine.close()


def largest_move(answer: Answer, single: Answer) -> float:
    """Of a log-probability that both name, up to the first different token."""
    moves = [0.0]
    for token, theirs, best, other in zip(answer.tokens, single.tokens, answer.best, single.best, strict=True):
        moves += [abs(best[name] - other[name]) for name in best.keys() & other.keys()]
        if token != theirs:
            break
    return max(moves)


def is_right(answer: Answer, single: Answer) -> bool:
    """Equal tokens, or the first different one stands where the single engine hardly preferred its own."""
    for token, theirs, other in zip(answer.tokens, single.tokens, single.best, strict=True):
        if token != theirs:
            return token in other and abs(other[token] - other[theirs]) < TOLERANCE
    return largest_move(answer, single) < TOLERANCE


def hand_over(p: Engine, d: Engine, tokens: list[int]) -> tuple[Answer, Answer]:
    """(with the prefill engine's cache, without any)."""
    answer, num_cached = d.answer(tokens, p.prefill(tokens))
    assert num_cached == len(tokens) - 1, "all but the last token come from the other engine"
    d.forget()
    single, num_cached = d.answer(tokens)
    assert num_cached == 0
    d.forget()
    return answer, single


def prompts() -> list[list[int]]:
    dice = random.Random(5)
    return [[dice.randrange(16, 500) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize(
    ("prefill", "decode"), [(PP2, TP1), (TP1, PP2), (TP2, PP2), (TP2, TP1), (TP1, TP2)], ids=lambda shape: str(shape)
)
def test_shapes_are_answered_right(engines, prefill, decode):
    check_answers(engines[str(prefill)], engines[str(decode)])


@pytest.mark.parametrize("plane", [0, 1], ids=["K", "V"])
def test_the_staged_path_and_one_corrupt_block(engines, hooks, plane):
    """Forced, and with its control: one block changed on the way, and the answer moves."""
    p, d = engines[f"staged {TP2}"], engines[f"staged {TP1}"]
    check_answers(p, d)
    order = hooks / "corrupt.json"
    order.write_text(json.dumps({"block": 1, "plane": plane}))
    answer, single = hand_over(p, d, prompts()[-1][::-1])
    order.unlink()
    assert largest_move(answer, single) > MOVED


def check_answers(p: Engine, d: Engine) -> None:
    for tokens in prompts():
        answer, single = hand_over(p, d, tokens)
        moved = largest_move(answer, single)
        print(f"prompt of {len(tokens)}: moved by {moved:.4f}")
        assert is_right(answer, single), f"prompt of {len(tokens)}: moved by {moved:.4f}"
