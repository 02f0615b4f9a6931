"""The tiny Llama whose cache holds 8-bit codes, with a scale for K and V of each layer in its checkpoint.

In:  a CodesShape and a seed.
Out: its configuration, and weights as Hugging Face and vLLM load them.
Law: as in `tiny_weights`; the weights are the tiny Llama's, whatever the scales, so two shapes differ in these alone.

K and V of the tiny Llama have deviations of about 1.2 and 1, so with these scales the largest of some millions is still
below 448, the largest code of e4m3.
"""

from dataclasses import dataclass, field

import numpy as np
from model.tiny_weights import TinyShape, Weights, tiny_weights


@dataclass(frozen=True, slots=True)
class CodesShape:
    """A Llama, and the scales of K and V of its first layer; each layer's are larger than those of the one before."""

    llama: TinyShape = field(default_factory=TinyShape)
    key_scale: float = 0.02
    value_scale: float = 0.03
    growth: float = 1.25

    @property
    def max_position(self) -> int:
        return self.llama.max_position


def codes_config() -> dict[str, object]:
    """What is to be added to the configuration of a Llama: numbers as they are, and a cache of codes."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    quantised = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}
    return {"quantization_config": quantised | {"kv_cache_scheme": scheme}}


def codes_weights(shape: CodesShape, seed: int, silent_tokens: range) -> Weights:
    """All weights, and the scales; `silent_tokens` are practically never said."""
    weights = tiny_weights(shape.llama, seed, silent_tokens)
    for layer in range(shape.llama.num_layers):
        for plane, scale in (("k", shape.key_scale), ("v", shape.value_scale)):
            name = f"model.layers.{layer}.self_attn.{plane}_scale"
            weights[name] = np.full(1, scale * shape.growth**layer, np.float32)
    return weights
