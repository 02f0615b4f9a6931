"""Seeded weights of normal scale for a tiny Llama, chosen so that the answer depends on all of the KV cache.

In:  a TinyShape and a seed.
Out: named numpy arrays as a Llama checkpoint holds them.
Law: the same shape and seed give the same bytes on every machine (numpy's PCG64, no torch); another seed gives other
     weights everywhere.

Every matrix is normal with deviation gain / sqrt(inputs), so activations keep their scale. The gains decide how much
the model listens to its cache. Evidence (torch 2.13 CPU; tests/tooling/test_tiny_model.py measures it again):

    scores of deviation 1.5   attention prefers some tokens, yet every block of 16 keeps weight: at 500 tokens,
                              replacing one block's keys or values moves a top-5 log-probability by more than 0.03
    logits of deviation 3     the best token has a probability around 0.3; answers of 64 tokens hold about 40 kinds
    float32 against float64   differs by less than 1e-5 in any top-5 log-probability, so 1e-4 tells right from wrong
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]
Matrix = tuple[str, int, int, float]
"""Name, outputs, inputs, gain."""

SCORE_DEVIATION = 1.5
ATTENTION_GAIN = 1.5
LOGIT_DEVIATION = 3.0


@dataclass(frozen=True, slots=True)
class TinyShape:
    """The shape of the model; 4 KV heads under 8 query heads, so that ranks can split and duplicate heads."""

    vocab_size: int = 512
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_size: int = 32
    max_position: int = 4096


def seeded_weights(matrices: Iterable[Matrix], norms: Mapping[str, NDArray[np.float32]], seed: int) -> Weights:
    """All weights of a model: its matrices, drawn in this order, and its norms."""
    random = np.random.Generator(np.random.PCG64(seed))
    return {name: _normal(random, rows, columns, gain) for name, rows, columns, gain in matrices} | dict(norms)


def vectors(value: float, size: int, names: Iterable[str]) -> dict[str, NDArray[np.float32]]:
    """Weights of norms: for each name as many elements of one value."""
    return {name: np.full(size, value, np.float32) for name in names}


def tiny_weights(shape: TinyShape, seed: int, silent_tokens: range) -> Weights:
    """All weights; `silent_tokens` get zero rows in the output matrix, so the model practically never says them."""
    weights = seeded_weights(_matrices(shape), vectors(1, shape.hidden_size, _norms(shape)), seed)
    silence(weights, silent_tokens)
    return weights


def silence(weights: Weights, tokens: range) -> None:
    """Zero rows in the output matrix for some tokens."""
    weights["lm_head.weight"][tokens.start : tokens.stop] = 0


def _normal(random: np.random.Generator, rows: int, columns: int, gain: float) -> NDArray[np.float32]:
    return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / math.sqrt(columns))


def _matrices(shape: TinyShape) -> Iterator[Matrix]:
    """Every matrix, in the order in which they are drawn."""
    hidden, queries, pairs = shape.hidden_size, shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    score_gain = math.sqrt(SCORE_DEVIATION)
    yield "model.embed_tokens.weight", shape.vocab_size, hidden, math.sqrt(hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", queries, hidden, score_gain
        yield f"{prefix}.self_attn.k_proj.weight", pairs, hidden, score_gain
        yield f"{prefix}.self_attn.v_proj.weight", pairs, hidden, 1.0
        yield f"{prefix}.self_attn.o_proj.weight", hidden, queries, ATTENTION_GAIN
        yield f"{prefix}.mlp.gate_proj.weight", shape.intermediate_size, hidden, 1.0
        yield f"{prefix}.mlp.up_proj.weight", shape.intermediate_size, hidden, 1.0
        yield f"{prefix}.mlp.down_proj.weight", hidden, shape.intermediate_size, 1.0
    yield "lm_head.weight", shape.vocab_size, hidden, LOGIT_DEVIATION


def _norms(shape: TinyShape) -> Iterator[str]:
    for layer in range(shape.num_layers):
        yield f"model.layers.{layer}.input_layernorm.weight"
        yield f"model.layers.{layer}.post_attention_layernorm.weight"
    yield "model.norm.weight"
