"""Asking engines, and judging whether two answers are the same.

In:  a `Question` and the address of an engine, of two engines that hand over, or of a router.
Out: `Answer`s with tokens and best log-probabilities; the judgement of an answer against a single engine's.
Law (what *right* means): equal tokens, or the first different token stands where the single engine's two best
     log-probabilities are closer than `TIE`; up to there the top-5 log-probabilities agree within `TOLERANCE`.
"""

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TIE = 1e-4
TOLERANCE = 1e-4
MOST_TIES = 0.01
PREFILL_PARAMS: Mapping[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router asks a prefill engine for (vllm-router 0.1.17)."""

Prompt = tuple[int, ...]


class RefusedError(RuntimeError):
    """An engine or router answered with an error; `status` and `message` are its words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message

    @property
    def kind(self) -> str:
        """The type that an OpenAI-compatible server gives the error."""
        return str(json.loads(self.message)["error"]["type"])


@dataclass(frozen=True, slots=True)
class Question:
    """One completion call. Several answers (`num_children`) are sampled with a seed, since greedy ones are refused."""

    prompts: tuple[Prompt, ...]
    num_answer_tokens: int = 8
    num_children: int = 1

    def body(self, salt: str | None = None) -> dict[str, Any]:
        """The JSON of the call; token ids are asked for in place of text."""
        several = {"n": self.num_children, "temperature": 1.0, "seed": 11}
        return {
            "model": "tiny",
            "prompt": [list(prompt) for prompt in self.prompts],
            "max_tokens": self.num_answer_tokens,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "ignore_eos": True,
            **(several if self.num_children > 1 else {"temperature": 0.0}),
            **({} if salt is None else {"cache_salt": salt}),
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of one choice; for each the best log-probabilities by token."""

    tokens: tuple[int, ...]
    best: tuple[Mapping[int, float], ...]


class Verdict(enum.Enum):
    """How an answer compares with the single engine's."""

    EQUAL = enum.auto()
    TIE = enum.auto()
    WRONG = enum.auto()


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict, and the largest difference of log-probabilities before the answers part."""

    verdict: Verdict
    gap: float
    why: str = ""


@dataclass(slots=True)
class Tally:
    """All judgements of a run; ties are allowed up to `MOST_TIES` of the answers."""

    counts: dict[Verdict, int] = field(default_factory=lambda: dict.fromkeys(Verdict, 0))

    def demand_right(self, answers: Sequence[Answer], single: Sequence[Answer]) -> None:
        """Fail the test unless every answer is right; note what was seen."""
        assert len(answers) == len(single), f"answers={len(answers)}, single={len(single)}"
        for ordinal, (answer, alone) in enumerate(zip(answers, single, strict=True)):
            found = judge(answer, alone)
            self.counts[found.verdict] += 1
            assert found.verdict is not Verdict.WRONG, f"answer {ordinal}: {found.why}"
            assert found.gap <= TOLERANCE, f"answer {ordinal}: log-probabilities differ by {found.gap:.2e}"

    def check(self) -> None:
        """Fail when too many answers were only right because of a tie."""
        total = sum(self.counts.values())
        assert self.counts[Verdict.TIE] <= MOST_TIES * total, f"ties={self.counts[Verdict.TIE]} of {total} answers"


def judge(answer: Answer, single: Answer) -> Judgement:
    """Compare an answer with the one a single engine gives."""
    length = len(single.tokens)
    if len(answer.tokens) != length:
        return Judgement(Verdict.WRONG, 0.0, f"{len(answer.tokens)} tokens, the single engine gives {length}")
    parting = next((i for i in range(length) if answer.tokens[i] != single.tokens[i]), None)
    # Where they part, both have still seen the same tokens, so the log-probabilities there must agree as well.
    shared = length if parting is None else parting + 1
    gap = max((_gap(answer.best[i], single.best[i]) for i in range(shared)), default=0.0)
    if parting is None:
        return Judgement(Verdict.EQUAL, gap)
    first, second = sorted(single.best[parting].values(), reverse=True)[:2]
    why = f"token {parting} is {answer.tokens[parting]}, alone {single.tokens[parting]}; {answer} against {single}"
    return Judgement(Verdict.TIE if first - second < TIE else Verdict.WRONG, gap, why)


def _gap(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """The largest difference of log-probabilities; a token in one top list alone counts from that list's other end."""
    floor_ours, floor_theirs = min(ours.values()), min(theirs.values())
    return max(abs(ours.get(t, floor_ours) - theirs.get(t, floor_theirs)) for t in {*ours, *theirs})


def largest_move(answer: Answer, single: Answer) -> float:
    """How far the top log-probabilities of the first token moved: what a corrupt block must change."""
    return _gap(answer.best[0], single.best[0])


async def ask(
    client: httpx.AsyncClient, url: str, question: Question, *, salt: str | None = None
) -> tuple[Answer, ...]:
    """The answers of one server (engine or router), in the order of prompts, then children.

    What is asked with a salt shares no cache with what is asked with another one, or with none.
    """
    return answers_of(await complete(client, url, question.body(salt)))


async def ask_by_hand(
    client: httpx.AsyncClient, prefill: str, decode: str, question: Question, *, salt: str | None = None
) -> tuple[Answer, ...]:
    """What a router does, in two calls: prefill on one engine, hand over, answer on the other."""
    params = await prefill_only(client, prefill, question, salt=salt)
    return await ask_with(client, decode, question, params, salt=salt)


async def prefill_only(
    client: httpx.AsyncClient, url: str, question: Question, *, salt: str | None = None
) -> dict[str, Any]:
    """Compute the prompt and keep its cache for another engine; answers its `kv_transfer_params`."""
    body = question.body(salt) | {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": dict(PREFILL_PARAMS)}
    reply = await complete(client, url, body)
    params = reply["kv_transfer_params"]
    assert params, f"{url} offers nothing: {json.dumps(reply)[:400]}"
    return dict(params)


async def ask_with(
    client: httpx.AsyncClient, url: str, question: Question, params: Mapping[str, Any], *, salt: str | None = None
) -> tuple[Answer, ...]:
    """The second call of a hand-over."""
    return answers_of(await complete(client, url, question.body(salt) | {"kv_transfer_params": dict(params)}))


async def complete(client: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """One completion call; `RefusedError` unless it succeeds."""
    reply = await client.post(f"{url}/v1/completions", json=dict(body))
    if reply.status_code != httpx.codes.OK:
        raise RefusedError(reply.status_code, reply.text)
    return dict(reply.json())


def answers_of(reply: Mapping[str, Any]) -> tuple[Answer, ...]:
    """The choices of a completion as answers."""
    choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
    return tuple(Answer(tuple(choice["token_ids"]), _best(choice["logprobs"])) for choice in choices)


def _best(logprobs: Mapping[str, Any]) -> tuple[Mapping[int, float], ...]:
    """Completions name tokens `token_id:7`, and put the chosen token in even when it is not among the best five."""
    return tuple(
        {int(name.removeprefix("token_id:")): float(value) for name, value in _five_best(top)}
        for top in logprobs["top_logprobs"]
    )


def _five_best(top: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(top.items(), key=lambda item: -item[1])[:5]
