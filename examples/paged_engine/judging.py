"""Whether answers are right.

In:  answers, and the model that gave them.
Out: a Verdict: how many are right, how many are ties, and what is wrong with the others.
Law: an answer is right if it has the tokens of the reference. It is a tie if the first different token stands where the
     reference's two best log-probabilities are closer than 1e-4 (for beams: where any two candidates were). Up to there
     the five best log-probabilities agree within 1e-4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_engine.contiguous import beam_search, log_probs
from paged_engine.generation import NUM_TOP, Answer
from paged_engine.llama import Llama

CLOSE = 1e-4
MAX_TIES = 0.01


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of `num_answers` so many are ties; `wrong` says what is wrong with each of those that are."""

    num_answers: int
    num_ties: int
    wrong: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Nothing is wrong, and not more than 1 % are ties."""
        return not self.wrong and self.num_ties <= MAX_TIES * self.num_answers


def judge(model: Llama, answers: Sequence[Answer]) -> Verdict:
    """Compare answers with what the model says with its whole context in one piece."""
    greedy = [answer for answer in answers if answer.job.beam_width == 1]
    faults = [_fault_of_beams(model, answer) for answer in answers if answer.job.beam_width > 1]
    if greedy:
        rows = log_probs(model, [answer.tokens for answer in greedy], [answer.job.scope.lora for answer in greedy])
        faults += [_fault(answer, row) for answer, row in zip(greedy, rows, strict=True)]
    wrong = tuple(fault for fault in faults if fault not in (None, TIE))
    return Verdict(len(answers), faults.count(TIE), tuple(filter(None, wrong)))


TIE = "tie"


def _fault(answer: Answer, reference: Tensor) -> str | None:
    """Since the reference reads the answer itself, its rows are right up to the first token that differs."""
    first = len(answer.job.prompt)
    rows = reference[first - 1 : -1].cpu()
    said = torch.tensor(answer.beams[0])
    differs = (rows.argmax(-1) != said).nonzero().flatten().tolist()
    stop = differs[0] if differs else len(said)
    best = rows.topk(NUM_TOP).values
    move = float((best - torch.tensor(answer.top))[:stop].abs().max()) if stop else 0.0
    if move > CLOSE:
        return f"log-probabilities move by {move:.2g}, prompt of {first} tokens"
    if not differs:
        return None
    gap = float(best[stop, 0] - best[stop, 1])
    return TIE if gap < CLOSE else f"token {stop} of {len(said)} differs, prompt of {first} tokens, gap {gap:.2g}"


def _fault_of_beams(model: Llama, answer: Answer) -> str | None:
    job = answer.job
    wanted = beam_search(model, job.prompt, job.scope.lora, job.beam_width, job.num_new)
    if tuple(wanted.tokens) != answer.beams:
        return TIE if wanted.closest < CLOSE else f"beams differ, prompt of {len(job.prompt)} tokens"
    move = max(abs(ours - theirs) for ours, theirs in zip(answer.scores, wanted.scores, strict=True))
    return f"log-probabilities of beams move by {move:.2g}" if move > CLOSE * job.num_new else None
