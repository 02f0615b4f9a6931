"""Caches of 8-bit codes: the type of their elements, and the scales that the engine's attention layers keep.

In:  vLLM's configuration, the attention layers of a rank, their cache tensors.
Out: `Codes`: the element type by its name in a CacheState, and the scale of each plane of each layer.
Law: a code is carried only with the one number that it is a multiple of, for K and for V of each layer, fixed before
the first token. Anything else (scales by head or token, computed while serving, packed types) is refused at start with
what was got and what is supported. vLLM keeps codes as bytes, so only its declared type says what they are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_core.errors import CallerError

if TYPE_CHECKING:
    import torch
    from vllm.config import CacheConfig, VllmConfig

_WIDE = ("auto", "bfloat16", "float16", "float32")
_CODES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""What vLLM's words for a cache type mean in it, where codes are those of OCP; `fp8_inc` is another device's."""
_PER_HEAD = "attn_head"
"""The strategy of a checkpoint whose scales are of heads."""


@dataclass(frozen=True, slots=True)
class Codes:
    """What the bytes of a cache are: K and V of each of the rank's layers have a scale, layer by layer.

    `computed_in` is the type that the model computes in, by which vLLM chooses how its CPU kernels pack a block.
    """

    dtype: str
    scales: tuple[float, ...]
    computed_in: "torch.dtype"

    def view_of(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """The engine's bytes as elements; `CallerError` if they are elements of another type."""
        import torch

        dtype = getattr(torch, self.dtype)
        if tensor.dtype not in (torch.uint8, dtype):
            raise CallerError(f"a cache of codes holds something else: tensor={tensor.dtype}, declared={self.dtype}")
        return tensor.view(dtype)


def refuse_packed(cache: "CacheConfig") -> None:
    """Raise `CallerError` for a type of cache that is neither wide nor plain codes of 8 bits with fixed scales."""
    if (dtype := str(cache.cache_dtype)) not in (*_WIDE, *_CODES):
        supported = ", ".join((*_WIDE, *_CODES))
        raise CallerError(
            "FerryConnector carries caches of plain elements, or of codes with one scale for K and one for V of a "
            f"layer: kv_cache_dtype={dtype}, supported are {supported}"
        )
    if dtype in _CODES and getattr(cache, "calculate_kv_scales", False):
        _refuse_calculated()


def codes_of(config: "VllmConfig", kv_caches: Mapping[str, "torch.Tensor"]) -> Codes | None:
    """What the layers of these cache tensors say of their codes; `None` if the tensors hold numbers as they are.

    Raises `CallerError` for codes that are not ours to carry.
    """
    if not any(tensor.dtype.itemsize == 1 for tensor in kv_caches.values()):
        return None
    from vllm.model_executor.models.utils import extract_layer_index

    names = sorted(kv_caches, key=extract_layer_index)
    layers = config.compilation_config.static_forward_context
    _refuse_calculated_by(layers[name] for name in names)
    dtype = _one_type({str(layers[name].kv_cache_dtype) for name in names})
    scales = tuple(_scale(name, layers[name], plane) for name in names for plane in ("k", "v"))
    return Codes(dtype, scales, config.model_config.dtype)


def _one_type(declared: set[str]) -> str:
    from vllm.platforms import current_platform

    if len(declared) != 1 or not declared <= set(_CODES):
        raise CallerError(
            "FerryConnector carries codes of one type for all layers: "
            f"kv_cache_dtype={' and '.join(sorted(declared))}, supported is one of {', '.join(_CODES)}"
        )
    if current_platform.is_fp8_fnuz():
        raise CallerError("FerryConnector carries codes of the OCP types: got=those of this GPU (fnuz)")
    return _CODES[declared.pop()]


def _refuse_calculated_by(layers: Iterable[Any]) -> None:
    if any(getattr(layer, "calculate_kv_scales", False) for layer in layers):
        _refuse_calculated()


def _refuse_calculated() -> None:
    raise CallerError(
        "FerryConnector carries codes whose scales are fixed before the first token: calculate_kv_scales=True, "
        "supported is False (scales from the checkpoint, or 1)"
    )


def _scale(name: str, layer: Any, plane: str) -> float:
    """The scale of K ("k") or V of one layer. vLLM keeps it as a tensor and as a number; kernels read either."""
    tensor, number = getattr(layer, f"_{plane}_scale", None), getattr(layer, f"_{plane}_scale_float", None)
    if tensor is None or number is None:
        raise CallerError(f"a layer does not tell the scale of its codes: layer={name}, missing={plane.upper()}")
    # Why the scheme too: a rank with a single head has a single scale, and other ranks have others.
    if tensor.numel() != 1 or (scheme := _scheme_of(layer)) == _PER_HEAD:
        got = f"{tensor.numel()} on this rank" if tensor.numel() != 1 else f"one for each head ({scheme})"
        raise CallerError(
            f"FerryConnector carries one scale for {plane.upper()} of a layer: layer={name}, got={got}, supported=1"
        )
    scale = float(tensor)
    if abs(scale - number) > _ROUNDING * abs(scale):
        raise CallerError(
            f"a layer has two scales for {plane.upper()}: layer={name}, on its device={scale:g}, on the host={number:g}"
        )
    return scale


def _scheme_of(layer: Any) -> str | None:
    """Whose the scales of a checkpoint are, where it says."""
    scheme = getattr(getattr(layer, "quant_config", None), "kv_cache_scheme", None)
    return str(scheme.get("strategy")) if isinstance(scheme, Mapping) else None


_ROUNDING = 1e-6
"""Of the number that the tensor keeps as float32."""
