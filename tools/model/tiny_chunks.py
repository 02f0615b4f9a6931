"""The tiny model whose tokens see their own chunk in most layers, of the shape of Llama 4 without experts.

In:  a ChunkShape and a seed.
Out: its configuration and weights as Hugging Face and vLLM load them.
Law: as in `tiny_weights`; the weights are the tiny Llama's under the names of this model.
"""

from dataclasses import dataclass, field

from model.tiny_weights import TinyShape, Weights, tiny_weights


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """A Llama of which all layers but the last see only tokens of their own chunk; that one has no positions."""

    llama: TinyShape = field(default_factory=TinyShape)
    chunk: int = 96

    @property
    def max_position(self) -> int:
        return self.llama.max_position

    @property
    def is_local(self) -> tuple[bool, ...]:
        return tuple(layer < self.llama.num_layers - 1 for layer in range(self.llama.num_layers))


def chunk_config(shape: ChunkShape) -> dict[str, object]:
    """The configuration, special tokens left out."""
    llama = shape.llama
    return {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "dtype": "float32",
        "vocab_size": llama.vocab_size,
        "hidden_size": llama.hidden_size,
        "intermediate_size": llama.intermediate_size,
        "intermediate_size_mlp": llama.intermediate_size,
        "num_hidden_layers": llama.num_layers,
        "num_attention_heads": llama.num_heads,
        "num_key_value_heads": llama.num_kv_heads,
        "head_dim": llama.head_size,
        "max_position_embeddings": llama.max_position,
        "attention_chunk_size": shape.chunk,
        "no_rope_layers": [int(is_local) for is_local in shape.is_local],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }


def chunk_weights(shape: ChunkShape, seed: int, silent_tokens: range) -> Weights:
    """All weights; `silent_tokens` are practically never said."""
    weights = tiny_weights(shape.llama, seed, silent_tokens)
    return {name.replace(".mlp.", ".feed_forward."): weight for name, weight in weights.items()}
