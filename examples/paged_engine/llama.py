"""A Llama from a checkpoint, with the attention left to the caller: the same code runs with blocks and without.

In:  rows of tokens, each with its position and adapter; a way to attend.
Out: the logits of every row.
Law: a row's keys and values depend on its adapter and on all tokens before it, on nothing else.

Legend: N rows, B sequences, Q queries and S keys of a sequence, H query heads, K key heads, D head size, V vocabulary.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

ADAPTED: Final = ("q_proj", "k_proj", "v_proj")
ADAPTER_RANK: Final = 4
ADAPTER_DEVIATION: Final = 0.3


class Rows(NamedTuple):
    """Tokens to compute: [N] tokens and positions, and the name of each row's adapter."""

    tokens: Tensor
    positions: Tensor
    adapters: tuple[str | None, ...]


class Attention(Protocol):
    """Takes queries [N, H, D], keys and values [N, K, D] of one layer; gives [N, H, D]."""

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """What the checkpoint's configuration says."""

    num_layers: int
    num_heads: int
    num_key_heads: int
    head_size: int
    hidden_size: int
    epsilon: float
    rope_theta: float

    @classmethod
    def read(cls, directory: Path) -> Self:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        return cls(
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            config["hidden_size"],
            config["rms_norm_eps"],
            config["rope_theta"],
        )


class Llama:
    """Weights and adapters on one device, in float32. `windows[i]` is what layer i looks back on; None: everything."""

    def __init__(
        self, directory: Path, windows: Sequence[int | None] = (None,), *, device: str = "cpu", adapters: str = ""
    ) -> None:
        self.shape = Shape.read(directory)
        self.device = torch.device(device)
        self.windows = tuple(windows[layer % len(windows)] for layer in range(self.shape.num_layers))
        self._weights = {name: it.float() for name, it in load_file(directory / "model.safetensors", device).items()}
        self._adapters = {name: self._make_adapter(seed) for seed, name in enumerate(adapters.split())}

    @torch.inference_mode()
    def logits(self, rows: Rows, attend: Attention) -> Tensor:
        """[N, V]"""
        hidden = self._weights["model.embed_tokens.weight"][rows.tokens]
        turn = _rotation(rows.positions, self.shape)
        for layer in range(self.shape.num_layers):
            prefix = f"model.layers.{layer}."
            normed = self._normed(hidden, prefix + "input_layernorm")
            hidden = hidden + self._attention(layer, normed, rows.adapters, turn, attend)
            hidden = hidden + self._feed_forward(prefix, self._normed(hidden, prefix + "post_attention_layernorm"))
        return self._linear(self._normed(hidden, "model.norm"), "lm_head")

    def _attention(
        self, layer: int, hidden: Tensor, adapters: Sequence[str | None], turn: tuple[Tensor, Tensor], attend: Attention
    ) -> Tensor:
        prefix = f"model.layers.{layer}.self_attn."
        queries, keys, values = (
            self._adapted(hidden, prefix + name, adapters).reshape(len(hidden), -1, self.shape.head_size)
            for name in ADAPTED
        )
        found = attend(layer, _turned(queries, turn), _turned(keys, turn), values)
        return self._linear(found.flatten(1), prefix + "o_proj")

    def _adapted(self, hidden: Tensor, name: str, adapters: Sequence[str | None]) -> Tensor:
        found = self._linear(hidden, name)
        for adapter in sorted({adapter for adapter in adapters if adapter is not None}):
            rows = torch.tensor([other == adapter for other in adapters], device=hidden.device)
            down, up = self._adapters[adapter][name]
            found[rows] += hidden[rows] @ down @ up
        return found

    def _feed_forward(self, prefix: str, hidden: Tensor) -> Tensor:
        gate = functional.silu(self._linear(hidden, prefix + "mlp.gate_proj"))
        return self._linear(gate * self._linear(hidden, prefix + "mlp.up_proj"), prefix + "mlp.down_proj")

    def _linear(self, hidden: Tensor, name: str) -> Tensor:
        return functional.linear(hidden, self._weights[name + ".weight"])

    def _normed(self, hidden: Tensor, name: str) -> Tensor:
        return functional.rms_norm(hidden, hidden.shape[-1:], self._weights[name + ".weight"], self.shape.epsilon)

    def _make_adapter(self, seed: int) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Low-rank changes of queries, keys and values, large enough to change what is said."""
        generator = torch.Generator().manual_seed(1000 + seed)
        made = {}
        for name, weight in self._weights.items():
            if name.removesuffix(".weight").rpartition(".")[2] in ADAPTED:
                outputs, inputs = weight.shape
                down = torch.randn(inputs, ADAPTER_RANK, generator=generator) * inputs**-0.5
                up = torch.randn(ADAPTER_RANK, outputs, generator=generator) * ADAPTER_DEVIATION
                made[name.removesuffix(".weight")] = (down.to(self.device), up.to(self.device))
        return made


def attend_masked(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Queries [B, Q, H, D], keys and values [B, S, K, D], mask [B, Q, S], true where a query reads: [B, Q, H, D]."""
    found = functional.scaled_dot_product_attention(
        queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask.unsqueeze(1), enable_gqa=True
    )
    return found.transpose(1, 2)


def reads(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """[..., Q, S]: a query reads its own token and those before, of a window the latest only."""
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _rotation(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, 1, D]."""
    exponents = torch.arange(0, shape.head_size, 2, device=positions.device) / shape.head_size
    angles = positions.unsqueeze(-1) / shape.rope_theta**exponents
    both = torch.cat([angles, angles], -1).unsqueeze(1)
    return both.cos(), both.sin()


def _turned(heads: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * turn[0] + torch.cat([-second, first], -1) * turn[1]
