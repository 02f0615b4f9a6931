"""What a model keeps in its KV cache, as values: layers, heads, sizes and attention windows.

In:  the shape of each attention layer and the number of tokens per block.
Out: `CacheSpec`, from which byte counts and layer groups follow.
Law: sizes are exact integers; nothing here knows about devices or ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from types import MappingProxyType
from typing import Final, Self

from kv_core.errors import CallerError
from kv_core.ids import LayerId

ELEMENT_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
        "uint8": 1,
    }
)
"""Bytes of one element, by the dtype's torch name without the prefix."""


def element_bytes(dtype: str) -> int:
    """Bytes of one element; CallerError for a dtype that we do not move."""
    if dtype not in ELEMENT_BYTES:
        raise CallerError(f"unknown dtype: ours={sorted(ELEMENT_BYTES)}, theirs={dtype!r}")
    return ELEMENT_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer's cache: `num_planes` is 2 for keys and values, 1 for a joint latent.

    `window` counts the latest tokens that attention still reads; None means all of them.
    """

    num_heads: int
    head_size: int
    num_planes: int
    dtype: str
    window: int | None = None

    def __post_init__(self) -> None:
        sizes = (self.num_heads, self.head_size, self.num_planes, 1 if self.window is None else self.window)
        if min(sizes) < 1:
            raise CallerError(f"every size of a layer is at least 1: {self}")
        element_bytes(self.dtype)

    @property
    def bytes_per_token(self) -> int:
        return self.num_planes * self.num_heads * self.head_size * element_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The cache of a whole model, one LayerSpec for each global attention layer."""

    layers: tuple[LayerSpec, ...]
    tokens_per_block: int

    def __post_init__(self) -> None:
        if not self.layers or self.tokens_per_block < 1:
            raise CallerError(
                f"a cache has layers and tokens: layers={len(self.layers)}, tokens_per_block={self.tokens_per_block}"
            )

    @classmethod
    def uniform(
        cls,
        *,
        num_layers: int,
        num_heads: int,
        head_size: int,
        dtype: str,
        tokens_per_block: int,
        num_planes: int = 2,
        windows: Sequence[int | None] = (None,),
    ) -> Self:
        """Layers that differ at most in their window; `windows` is repeated over the layers (core spec 7.1)."""
        if not windows:
            raise CallerError("windows is empty; None stands for full attention")
        layers = (LayerSpec(num_heads, head_size, num_planes, dtype, window) for window in cycle(windows))
        return cls(tuple(islice(layers, num_layers)), tokens_per_block)

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.tokens_per_block

    def groups(self) -> dict[int | None, tuple[LayerId, ...]]:
        """Layers by window: ascending windows first, full attention (None) last."""
        members: dict[int | None, list[LayerId]] = {}
        for layer_id, layer in enumerate(self.layers):
            members.setdefault(layer.window, []).append(LayerId(layer_id))
        ordered = sorted(members, key=lambda window: (window is None, window or 0))
        return {window: tuple(members[window]) for window in ordered}
