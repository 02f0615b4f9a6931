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
from kv_transfer.plan.cache_state import FULL, LATENT, MAX_HEAD_SIZE, MAX_HEADS, MAX_LAYERS, MAX_WINDOW

_WINDOWED: Final = ("sliding_attention", "chunked_attention")
_WORDS: Final = ("layers", "heads", "size", "dtype", "window")
_MAX_DIGITS: Final = 20


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
    if (path := _file(text)) is not None:
        return _from_config(path)
    if "=" not in text:
        raise CallerError(
            f"no such model: got={text!r}, wanted=a config.json, its folder, or layers=..,heads=..,size=.."
        )
    return _from_words(text)


def count(name: str, text: str, most: int) -> int:
    """A positive number of at most so many; CallerError for anything else."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text) > 0):
        raise CallerError(f"{name} is not a positive number: got={text!r}")
    return _bounded(name, int(text), most)


def _file(text: str) -> Path | None:
    path = Path(text)
    try:
        found = path / "config.json" if path.is_dir() else path
        return found if found.is_file() else None
    except (OSError, ValueError):
        # Too long, or not a name at all: words, perhaps.
        return None


def _from_words(text: str) -> ModelFacts:
    words = dict(word.split("=", 1) for word in text.split(",") if "=" in word)
    unknown = sorted(set(words) - set(_WORDS))
    missing = [name for name in _WORDS[:3] if name not in words]
    if unknown or missing:
        raise CallerError(f"a model needs {', '.join(_WORDS[:3])}: missing={missing}, unknown={unknown}, got={text!r}")
    num_layers = count("layers", words["layers"], MAX_LAYERS)
    windows = (count("window", words["window"], MAX_WINDOW),) * num_layers if "window" in words else ()
    heads, size = count("heads", words["heads"], MAX_HEADS), count("size", words["size"], MAX_HEAD_SIZE)
    return ModelFacts("the model", FULL, num_layers, heads, size, 2, words.get("dtype", "bfloat16"), windows)


def _from_config(path: Path) -> ModelFacts:
    config = _read(path)
    name = path.parent.name or str(path)
    num_layers = _field(config, path, "num_hidden_layers", MAX_LAYERS)
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if config.get("kv_lora_rank"):
        size = sum(_field(config, path, each, MAX_HEAD_SIZE) for each in ("kv_lora_rank", "qk_rope_head_dim"))
        return ModelFacts(name, LATENT, num_layers, 1, size, 1, dtype)
    num_heads = _field(config, path, "num_attention_heads", MAX_HEADS)
    if config.get("head_dim"):
        size = _field(config, path, "head_dim", MAX_HEAD_SIZE)
    else:
        size = _field(config, path, "hidden_size", MAX_HEADS * MAX_HEAD_SIZE) // num_heads
    heads = _field(config, path, "num_key_value_heads", MAX_HEADS) if config.get("num_key_value_heads") else num_heads
    windows = _windows(config, path, num_layers)
    chunked = bool(windows) and not config.get("sliding_window")
    return ModelFacts(name, FULL, num_layers, heads, size, 2, dtype, windows, chunked)


def _read(path: Path) -> Mapping[str, Any]:
    """The part of the file that is about text; CallerError if it is no JSON object."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CallerError(f"not a model's configuration: {path}: {error}") from error
    if isinstance(config, dict) and config.get("text_config") is not None:
        config = config["text_config"]
    if not isinstance(config, dict):
        raise CallerError(f"not a model's configuration: {path}: wanted=an object, got={type(config).__name__}")
    return config


def _windows(config: Mapping[str, Any], path: Path, num_layers: int) -> tuple[int, ...]:
    """The window of each layer: named layer by layer, or one for all unless the configuration switches it off."""
    name = "sliding_window" if config.get("sliding_window") else "attention_chunk_size"
    if not config.get(name) or not config.get("use_sliding_window", True):
        return ()
    window, kinds = _field(config, path, name, MAX_WINDOW), config.get("layer_types")
    if kinds is None:
        return (window,) * num_layers
    if not isinstance(kinds, list):
        raise CallerError(f"the configuration lacks a list: field=layer_types, got={kinds!r}, file={path}")
    return tuple(window if kind in _WINDOWED else 0 for kind in kinds[:num_layers])


def _field(config: Mapping[str, Any], path: Path, name: str, most: int) -> int:
    found = config.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise CallerError(f"the configuration lacks a number: field={name}, got={found!r}, file={path}")
    return _bounded(name, found, most)


def _bounded(name: str, number: int, most: int) -> int:
    if number > most:
        raise CallerError(f"{name} is too large: got={number}, most={most}")
    return number
