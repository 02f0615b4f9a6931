"""The reference: the same model with its whole context in one piece, no blocks, no reuse, nothing kept.

In:  sequences of tokens.
Out: log-probabilities of what follows each token; the beams of a beam search.
Law: every call computes all tokens anew.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paged_engine.llama import Llama, Rows, attend_masked, reads


class Beams(NamedTuple):
    """The best continuations, best first, with their log-probabilities.

    `closest` is the smallest distance, in any step, between candidates that follow each other in rank.
    """

    tokens: list[tuple[int, ...]]
    scores: list[float]
    closest: float


def log_probs(model: Llama, sequences: Sequence[Sequence[int]], adapters: Sequence[str | None]) -> list[Tensor]:
    """For each sequence [tokens, V]: what follows each of its tokens."""
    length = max(map(len, sequences))
    padded = torch.tensor([[*tokens, *[0] * (length - len(tokens))] for tokens in sequences], device=model.device)
    positions = torch.arange(length, device=model.device)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        # Why no mask for the padding: it comes last, and nothing reads what comes later.
        mask = reads(positions, positions, model.windows[layer]).expand(len(sequences), -1, -1)
        whole = [it.reshape(len(sequences), length, *it.shape[1:]) for it in (queries, keys, values)]
        return attend_masked(whole[0], whole[1], whole[2], mask).flatten(0, 1)

    names = tuple(adapter for adapter in adapters for _ in range(length))
    logits = model.logits(Rows(padded.flatten(), positions.repeat(len(sequences)), names), attend)
    found = logits.reshape(len(sequences), length, -1).log_softmax(-1)
    return [one[: len(tokens)] for one, tokens in zip(found, sequences, strict=True)]


def beam_search(model: Llama, prompt: Sequence[int], adapter: str | None, width: int, num_new: int) -> Beams:
    """The best `width` continuations of `num_new` tokens; every beam is extended as a whole in every step."""
    beams: list[tuple[int, ...]] = [()]
    scores, closest = torch.zeros(1), float("inf")
    for _ in range(num_new):
        rows = log_probs(model, [[*prompt, *beam] for beam in beams], [adapter] * len(beams))
        totals = (scores[:, None] + torch.stack([row[-1].cpu() for row in rows])).flatten()
        best = totals.topk(width + 1)
        closest = min(closest, float((best.values[:-1] - best.values[1:]).min()))
        vocabulary = rows[0].shape[-1]
        beams = [(*beams[at // vocabulary], at % vocabulary) for at in best.indices[:width].tolist()]
        scores = best.values[:width]
    return Beams(beams, scores.tolist(), closest)
