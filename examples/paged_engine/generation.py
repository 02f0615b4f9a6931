"""How one request goes on: from logits to tokens.

In:  the logits of the tokens that were computed.
Out: the tokens to compute next; what was accepted of them.
Law: nothing here knows of blocks. A generation that starts again from its tokens gives the same answer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kv_core.keys import Scope
from kv_core.request import NO_SCOPE

Drafter = Callable[[Sequence[int], int], Sequence[int]]
"""Guesses what follows these tokens: at most so many."""

NUM_TOP = 5


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt, how many tokens to answer with, and who may share its cache. `scope.lora` names the adapter."""

    prompt: tuple[int, ...]
    num_new: int
    scope: Scope = NO_SCOPE
    beam_width: int = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """The continuations, best first (one unless beams were asked for), with their log-probabilities.

    `top` has the five best log-probabilities for each token of a single continuation. `num_cached` prompt tokens were
    found when the job was first admitted.
    """

    job: Job
    beams: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...]
    top: tuple[tuple[float, ...], ...]
    num_cached: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and best continuation."""
        return (*self.job.prompt, *self.beams[0])


class Generation(ABC):
    """A job on its way. `tokens` are known, whether computed or not; beams have more in `inputs`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.tokens = list(job.prompt)

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether all tokens are there."""

    @abstractmethod
    def propose(self) -> int:
        """Decide on the next step; how many tokens it computes."""

    @abstractmethod
    def inputs(self, num_filled: int) -> list[Sequence[int]]:
        """The tokens to compute, for each beam that is different by now, if `num_filled` are computed."""

    @abstractmethod
    def accept(self, logits: Sequence[Tensor]) -> int:
        """Take the logits of these tokens; how many of the last of them turned out to be wrong."""

    @abstractmethod
    def restart(self) -> None:
        """Everything that was computed is lost or given up."""

    @abstractmethod
    def answer(self, num_cached: int) -> Answer:
        """What came of it."""


class Greedy(Generation):
    """The most probable token each time, several at once if a drafter guesses them."""

    def __init__(self, job: Job, drafter: Drafter | None = None) -> None:
        super().__init__(job)
        self._drafter = drafter
        self._drafts: list[int] = []
        self._top: list[tuple[float, ...]] = []

    @property
    def num_left(self) -> int:
        return len(self.job.prompt) + self.job.num_new - len(self.tokens)

    @property
    def is_done(self) -> bool:
        return self.num_left == 0

    def propose(self) -> int:
        limit = self.num_left - 1
        self._drafts = list(self._drafter(self.tokens, limit)) if self._drafter and limit else []
        return 1 + len(self._drafts)

    def inputs(self, num_filled: int) -> list[Sequence[int]]:
        return [[*self.tokens[num_filled:], *self._drafts]]

    def accept(self, logits: Sequence[Tensor]) -> int:
        rows = logits[0][-1 - len(self._drafts) :].log_softmax(-1)
        said = rows.argmax(-1).tolist()
        num_right = next((at for at, draft in enumerate(self._drafts) if draft != said[at]), len(self._drafts))
        self.tokens += said[: num_right + 1]
        self._top += [tuple(row) for row in rows[: num_right + 1].topk(NUM_TOP).values.tolist()]
        num_wrong = len(self._drafts) - num_right
        self._drafts = []
        return num_wrong

    def restart(self) -> None:
        self._drafts = []

    def answer(self, num_cached: int) -> Answer:
        said = tuple(self.tokens[len(self.job.prompt) :])
        return Answer(self.job, (said,), (sum(top[0] for top in self._top),), tuple(self._top), num_cached)


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation. `owners[i]` is the beam in whose blocks the cache of its i-th token lies."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    owners: tuple[int, ...] = ()


class BeamSearch(Generation):
    """The best continuations of all beams together. Beams change places; cache stays where it was written."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.beams = [Beam()]

    @property
    def is_done(self) -> bool:
        return len(self.beams[0].tokens) == self.job.num_new

    def propose(self) -> int:
        return 1

    def inputs(self, num_filled: int) -> list[Sequence[int]]:
        if num_filled < len(self.job.prompt):
            return [self.tokens[num_filled:]]
        return [beam.tokens[-1:] for beam in self.beams]

    def accept(self, logits: Sequence[Tensor]) -> int:
        rows = [row[-1].log_softmax(-1).cpu() + beam.score for row, beam in zip(logits, self.beams, strict=True)]
        candidates = [
            (score, parent, token)
            for parent, row in enumerate(rows)
            for score, token in zip(*(it.tolist() for it in row.topk(self.job.beam_width)), strict=True)
        ]
        best = sorted(candidates, reverse=True)[: self.job.beam_width]
        self.beams = [self._child(parent, token, score) for score, parent, token in best]
        return 0

    def _child(self, parent: int, token: int, score: float) -> Beam:
        beam = self.beams[parent]
        # The parent's last token, if it is not of the prompt, was written to the parent's own block just now.
        owners = (*beam.owners, parent) if beam.tokens else ()
        return Beam((*beam.tokens, token), score, owners)

    def restart(self) -> None:
        self.beams = [Beam()]

    def answer(self, num_cached: int) -> Answer:
        tokens, scores = (tuple(it) for it in zip(*((beam.tokens, beam.score) for beam in self.beams), strict=True))
        return Answer(self.job, tokens, scores, (), num_cached)


def start(job: Job, drafter: Drafter | None) -> Generation:
    """The generation that the job asks for."""
    return Greedy(job, drafter) if job.beam_width == 1 else BeamSearch(job)


@dataclass(slots=True)
class Seat:
    """A job in the engine: what the manager calls it, how far it is, and how many tokens are in the cache."""

    request_id: str
    generation: Generation
    num_filled: int = 0
    num_cached: int | None = None
