"""The tiny model with sliding windows in most of its layers, of the shape of Gemma 3.

In:  a HybridShape and a seed.
Out: its configuration and weights as Hugging Face and vLLM load them.
Law: as in `tiny_weights`. The gains keep scores and answers as lively as the tiny Llama's: queries and keys are normed
here, so the scale of the scores lies in the configuration, and that of what attention adds in the norm after it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from model.tiny_weights import ATTENTION_GAIN, LOGIT_DEVIATION, SCORE_DEVIATION, Matrix, Weights, silence, vectors
from model.tiny_weights import seeded_weights as seeded

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class HybridShape:
    """Two sliding layers before each full one: with 6 layers vLLM makes 3 cache groups of 2 layers each.

    `window` counts the token itself; it is no multiple of a block.
    """

    vocab_size: int = 512
    hidden_size: int = 256
    intermediate_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    max_position: int = 4096
    window: int = 80
    sliding_per_full: int = 2

    @property
    def layer_types(self) -> tuple[str, ...]:
        each = self.sliding_per_full + 1
        return tuple(FULL if layer % each == each - 1 else SLIDING for layer in range(self.num_layers))


ONLY_WINDOWS = HybridShape(num_layers=2, sliding_per_full=2)
"""Every layer slides: one cache group."""


def hybrid_config(shape: HybridShape) -> dict[str, object]:
    """The configuration, special tokens left out."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "float32",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.max_position,
        "sliding_window": shape.window,
        "layer_types": list(shape.layer_types),
        "rope_parameters": {FULL: rope, SLIDING: rope},
        # Normed queries and keys of D elements give scores of deviation sqrt(D / this).
        "query_pre_attn_scalar": round(shape.head_size / SCORE_DEVIATION**2),
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }


def hybrid_weights(shape: HybridShape, seed: int, silent_tokens: range) -> Weights:
    """All weights; `silent_tokens` are practically never said."""
    layers = [f"model.layers.{layer}" for layer in range(shape.num_layers)]
    # Gemma's norms multiply by one more than their weight.
    norms = vectors(
        0, shape.hidden_size, [f"{layer}.{name}" for layer in layers for name in _NORMS] + ["model.norm.weight"]
    )
    norms |= vectors(
        ATTENTION_GAIN - 1, shape.hidden_size, [f"{layer}.post_attention_layernorm.weight" for layer in layers]
    )
    norms |= vectors(0, shape.head_size, [f"{layer}.self_attn.{x}_norm.weight" for layer in layers for x in "qk"])
    weights = seeded(_matrices(shape), norms, seed)
    silence(weights, silent_tokens)
    return weights


_NORMS = ("input_layernorm.weight", "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")


def _matrices(shape: HybridShape) -> Iterator[Matrix]:
    hidden, queries, pairs = shape.hidden_size, shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    # The model multiplies what it embeds by the root of its hidden size.
    yield "model.embed_tokens.weight", shape.vocab_size, hidden, 1.0
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", queries, hidden, 1.0
        yield f"{prefix}.self_attn.k_proj.weight", pairs, hidden, 1.0
        yield f"{prefix}.self_attn.v_proj.weight", pairs, hidden, 1.0
        yield f"{prefix}.self_attn.o_proj.weight", hidden, queries, math.sqrt(2)
        yield f"{prefix}.mlp.gate_proj.weight", shape.intermediate_size, hidden, 1.0
        yield f"{prefix}.mlp.up_proj.weight", shape.intermediate_size, hidden, 1.0
        yield f"{prefix}.mlp.down_proj.weight", hidden, shape.intermediate_size, 1.0
    yield "lm_head.weight", shape.vocab_size, hidden, LOGIT_DEVIATION
