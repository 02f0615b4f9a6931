"""The tiny model with latent attention (MLA), of the shape of DeepSeek V2 without experts.

In:  a LatentShape and a seed.
Out: its configuration and weights as Hugging Face and vLLM load them.
Law: as in `tiny_weights`. A cache row has 512 + 64 elements, the only size that vLLM's CPU kernel takes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from model.tiny_weights import ATTENTION_GAIN, LOGIT_DEVIATION, SCORE_DEVIATION, Matrix, Weights, silence, vectors
from model.tiny_weights import seeded_weights as seeded


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes in elements; `rank` and `rope_size` make up a row of the cache."""

    vocab_size: int = 512
    hidden_size: int = 256
    intermediate_size: int = 256
    num_layers: int = 3
    num_heads: int = 4
    rank: int = 512
    rope_size: int = 64
    plain_size: int = 32
    value_size: int = 32
    max_position: int = 4096


def latent_config(shape: LatentShape) -> dict[str, object]:
    """The configuration, special tokens left out."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "dtype": "float32",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "q_lora_rank": None,
        "kv_lora_rank": shape.rank,
        "qk_rope_head_dim": shape.rope_size,
        "qk_nope_head_dim": shape.plain_size,
        "v_head_dim": shape.value_size,
        "first_k_dense_replace": shape.num_layers,
        "max_position_embeddings": shape.max_position,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            # As the published models have it; vLLM's CPU kernel for plain RoPE takes no part of a query (0.32).
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": shape.max_position // 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
        "attention_bias": False,
    }


def latent_weights(shape: LatentShape, seed: int, silent_tokens: range) -> Weights:
    """All weights; `silent_tokens` are practically never said."""
    layers = [f"model.layers.{layer}" for layer in range(shape.num_layers)]
    norms = vectors(
        1, shape.hidden_size, [f"{layer}.{name}" for layer in layers for name in _NORMS] + ["model.norm.weight"]
    )
    norms |= vectors(1, shape.rank, [f"{layer}.self_attn.kv_a_layernorm.weight" for layer in layers])
    weights = seeded(_matrices(shape), norms, seed)
    silence(weights, silent_tokens)
    return weights


_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


def _matrices(shape: LatentShape) -> Iterator[Matrix]:
    hidden, row = shape.hidden_size, shape.rank + shape.rope_size
    queries = shape.num_heads * (shape.plain_size + shape.rope_size)
    score_gain = math.sqrt(SCORE_DEVIATION)
    yield "model.embed_tokens.weight", shape.vocab_size, hidden, math.sqrt(hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", queries, hidden, score_gain
        yield f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", row, hidden, score_gain
        pairs = shape.num_heads * (shape.plain_size + shape.value_size)
        yield f"{prefix}.self_attn.kv_b_proj.weight", pairs, shape.rank, score_gain
        yield f"{prefix}.self_attn.o_proj.weight", hidden, shape.num_heads * shape.value_size, ATTENTION_GAIN
        yield f"{prefix}.mlp.gate_proj.weight", shape.intermediate_size, hidden, 1.0
        yield f"{prefix}.mlp.up_proj.weight", shape.intermediate_size, hidden, 1.0
        yield f"{prefix}.mlp.down_proj.weight", hidden, shape.intermediate_size, 1.0
    yield "lm_head.weight", shape.vocab_size, hidden, LOGIT_DEVIATION
