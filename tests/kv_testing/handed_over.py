"""One hand-over between two real engines, judged, with the bytes that it moved."""

from collections.abc import Callable
from typing import Any

import pytest

from kv_testing.answers import Question, Tally, ask, ask_by_hand
from kv_testing.servers import IS_OURS, Fleet
from kv_testing.servers_hooks import bytes_received


def moved_bytes(
    fleet: Fleet,
    pair: tuple[str, str],
    run: Callable[..., Any],
    tally: Tally,
    question: Question,
    alone: str | None = None,
) -> float:
    """As the decode engine counts them. Demands the answer that `alone` gives; the prefill engine, if none is named."""
    prefill, decode = (fleet.engine(name) for name in pair)
    single = fleet.engine(alone or pair[0])
    before = bytes_received(decode)
    answers = run(lambda client: ask_by_hand(client, prefill.url, decode.url, question))
    tally.demand_right(answers, run(lambda client: ask(client, single.url, question)))
    if not IS_OURS:
        pytest.skip("answers are right; bytes are only counted by our connector")
    return bytes_received(decode) - before
