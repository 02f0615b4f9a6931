"""What a model's configuration says of its KV cache.

In:  a config.json as published with a model (or the folder that holds it), or `key=value` words.
Out: ModelFacts.
Law: nothing is guessed: what the configuration does not say, and has no rule for, is asked for by name.

    layers=32,heads=8,size=128,dtype=bfloat16[,window=4096]
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kv_core.errors import CallerError
from kv_transfer.plan.cache_state import FULL, LATENT

_WINDOWED: Final = ("sliding_attention", "chunked_attention")
_WORDS: Final = ("layers", "heads", "size", "dtype", "window")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Shape of the cache of one model; `head_size` in elements, `windows` and `chunked` as in a CacheState."""

    name: str
    attention: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    num_planes: int
    dtype: str
    windows: tuple[int, ...] = ()
    chunked: bool = False


def model_facts(text: str) -> ModelFacts:
    """From a path if there is such a file or folder, else from `key=value` words; CallerError for what is neither."""
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _from_config(path)
    if "=" not in text:
        raise CallerError(
            f"no such model: got={text!r}, wanted=a config.json, its folder, or layers=..,heads=..,size=.."
        )
    return _from_words(text)


def _from_words(text: str) -> ModelFacts:
    words = dict(word.split("=", 1) for word in text.split(",") if "=" in word)
    unknown = sorted(set(words) - set(_WORDS))
    missing = [name for name in _WORDS[:3] if name not in words]
    if unknown or missing:
        raise CallerError(f"a model needs {', '.join(_WORDS[:3])}: missing={missing}, unknown={unknown}, got={text!r}")
    num_layers = _number("layers", words["layers"])
    windows = (_number("window", words["window"]),) * num_layers if "window" in words else ()
    heads, size = _number("heads", words["heads"]), _number("size", words["size"])
    return ModelFacts("the model", FULL, num_layers, heads, size, 2, words.get("dtype", "bfloat16"), windows)


def _from_config(path: Path) -> ModelFacts:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise CallerError(f"not a model's configuration: {path}: {error}") from error
    config = config.get("text_config", config)
    name = path.parent.name or str(path)
    num_layers = _field(config, path, "num_hidden_layers")
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if "kv_lora_rank" in config:
        size = _field(config, path, "kv_lora_rank") + _field(config, path, "qk_rope_head_dim")
        return ModelFacts(name, LATENT, num_layers, 1, size, 1, dtype)
    num_heads = _field(config, path, "num_attention_heads")
    size = config.get("head_dim") or _field(config, path, "hidden_size") // num_heads
    heads = config.get("num_key_value_heads") or num_heads
    windows = _windows(config, num_layers)
    chunked = bool(windows) and not config.get("sliding_window")
    return ModelFacts(name, FULL, num_layers, heads, size, 2, dtype, windows, chunked)


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The window of each layer: named layer by layer, or one for all unless the configuration switches it off."""
    window = config.get("sliding_window") or config.get("attention_chunk_size") or 0
    kinds = config.get("layer_types")
    if not window or not config.get("use_sliding_window", True):
        return ()
    if kinds is None:
        return (window,) * num_layers
    return tuple(window if kind in _WINDOWED else 0 for kind in kinds[:num_layers])


def _field(config: Mapping[str, Any], path: Path, name: str) -> int:
    if not isinstance(config.get(name), int):
        raise CallerError(f"the configuration lacks a number: field={name}, got={config.get(name)!r}, file={path}")
    return int(config[name])


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise CallerError(f"{name} is not a positive number: got={text!r}")
    return int(text)
