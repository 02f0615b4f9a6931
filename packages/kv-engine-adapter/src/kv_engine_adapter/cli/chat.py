"""Chats with an OpenAI-compatible server, timed.

In:  a question, the address of an engine or router.
Out: the answer, its sizes, and the time until its first token.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kv_engine_adapter.cli.engines import MODEL_NAME

MAX_ANSWER_TOKENS = 24
_SYSTEM = "You keep the log of a small ferry."
_VOYAGE = (
    "At dawn the ferry left the pier with {n} crates, two mules and a letter for the keeper of the light. "
    "The tide was late, the wind came round from the north, and nobody on deck spoke until the bell. "
)


class ChatError(RuntimeError):
    """A server did not answer; names it and says what it said."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back, and when its first token did."""

    text: str
    num_prompt_tokens: int
    num_answer_tokens: int
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Chat:
    """One question to ask, as a stream, of whichever server."""

    title: str
    question: str

    def ask(self, url: str, *, salt: str | None = None, listen: Callable[[str], None] = lambda _: None) -> Reply:
        """Ask, and hand each piece of text to `listen` as it arrives; `salt` keeps the prefix cache out of it."""
        from openai import OpenAIError

        try:
            return self._ask(url, salt, listen)
        except OpenAIError as error:
            raise ChatError(f"{url} did not answer {self.title!r}: {error}") from error

    def _ask(self, url: str, salt: str | None, listen: Callable[[str], None]) -> Reply:
        began = time.perf_counter()
        pieces: list[str] = []
        first_s, usage = 0.0, None
        for chunk in self._stream(url, salt):
            usage = chunk.usage or usage
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text:
                first_s = first_s or time.perf_counter() - began
                pieces.append(text)
                listen(text)
        assert usage is not None, "the stream was asked to end with its usage"
        return Reply("".join(pieces), usage.prompt_tokens, usage.completion_tokens, first_s)

    def _stream(self, url: str, salt: str | None) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0).chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "system", "content": _SYSTEM}, {"role": "user", "content": self.question}],
            max_tokens=MAX_ANSWER_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, **({"cache_salt": salt} if salt else {})},
        )


def _voyages(num_voyages: int) -> str:
    log = "".join(_VOYAGE.format(n=7 * voyage + num_voyages + 2) for voyage in range(num_voyages))
    return f"{log}What did the keeper of the light answer?"


CONVERSATIONS = tuple(Chat(f"chat {n}", _voyages(length)) for n, length in enumerate((1, 3, 6), start=1))
