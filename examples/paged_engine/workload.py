"""Jobs that make a cache work: conversations that go on, prompts asked again, prompts that differ halfway.

In:  a source of randomness, what was answered before.
Out: the next jobs; guesses of what a prompt will be answered with.
Law: the same seed gives the same jobs for the same answers.
"""

from collections.abc import Sequence
from random import Random

from kv_core.keys import Scope
from paged_engine.generation import Answer, Job

TOKENS = range(16, 512)
LENGTHS = range(3, 40)
NEW_TOKENS = range(4, 11)
LONGEST_HISTORY = 48
MAX_TOKENS = LONGEST_HISTORY + LENGTHS.stop + NEW_TOKENS.stop


def random_tokens(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.choices(TOKENS, k=count))


def next_jobs(
    random: Random, history: Sequence[Answer], count: int, scopes: Sequence[Scope], beam_width: int = 1
) -> list[Job]:
    """Jobs that continue, repeat or branch off from earlier ones, in any of the scopes, and some that are new."""
    return [
        Job(_prompt(random, history), random.choice(NEW_TOKENS), random.choice(scopes), beam_width)
        for _ in range(count)
    ]


def _prompt(random: Random, history: Sequence[Answer]) -> tuple[int, ...]:
    kind = random.choice(["new", "again", "branch", "branch", "continue"]) if history else "new"
    if kind == "new":
        return random_tokens(random, random.choice(LENGTHS))
    earlier = random.choice(history)
    if kind == "again":
        return earlier.job.prompt
    tokens = earlier.tokens[:LONGEST_HISTORY]
    kept = tokens if kind == "continue" else tokens[: random.randrange(len(tokens))]
    return kept + random_tokens(random, random.choice(LENGTHS[: len(LENGTHS) // 2]))


class HistoryDrafter:
    """Guesses that an answer goes on as an earlier one did, and is wrong now and then; of the rest it knows nothing."""

    def __init__(self, random: Random, num_drafts: int) -> None:
        self._random = random
        self._num_drafts = num_drafts
        self.history: list[Answer] = []

    def __call__(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        count = min(limit, self._num_drafts)
        known = tuple(tokens)
        alike = (answer.tokens for answer in self.history if answer.tokens[: len(known)] == known)
        guess = (*next(alike, known)[len(known) :], *random_tokens(self._random, count))[:count]
        return [token if self._random.random() < 0.7 else self._random.choice(TOKENS) for token in guess]
