"""Which weights an engine serves, as one digest that two engines compare before they exchange KV.

In:  the model's own configuration and its checkpoint directory.
Out: 64 hex digits, equal exactly if shapes, rope, quantisation, tensor index and a fixed sample of the weights agree.
Law: no name, path or library version enters, so two copies of one checkpoint agree wherever they lie; sharding of the
     files does not enter either, because the sample is taken by tensor name and position inside the tensor. Nor do the
     values of scales of a cache, which only a cache of codes has, and tells to whom it hands itself over.
Cost: the headers of all files and 64 reads of 4 KiB, once at start.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kv_core.errors import CallerError

_NAMES = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "model_path"})
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100 << 20
_CACHE_SCALE = re.compile(r"\.(kv|k|v)_(cache\.)?scale$")
"""The scale of a layer's K, V, or both, by the names it has in checkpoints."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where one tensor of a safetensors file lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int


def model_fingerprint(config: Mapping[str, object], weights: Path | None, *, extra: Mapping[str, object]) -> str:
    """The digest of a model; `weights` is its checkpoint directory, `None` when the engine makes the weights up.

    `extra` is what the engine adds to the configuration and what changes the KV: quantisation, overrides, seed of
    made-up weights. Raises `CallerError` if the directory holds no weights.
    """
    digest = hashlib.sha256(_canonical({"config": _without_names(config), "extra": extra}))
    if weights is not None:
        for part in _weight_parts(weights):
            digest.update(part)
    return digest.hexdigest()


def read_config(directory: Path) -> dict[str, object]:
    """The checkpoint's `config.json`; `CallerError` if it is missing or no mapping."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CallerError(f"no readable model configuration at {path}: {error}") from error
    if not isinstance(config, dict):
        raise CallerError(f"{path}: expected a mapping, got {type(config).__name__}")
    return config


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


def _without_names(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_names(item) for key, item in value.items() if key not in _NAMES}
    if isinstance(value, list | tuple):
        return [_without_names(item) for item in value]
    return value


def _weight_parts(directory: Path) -> Iterator[bytes]:
    tensors = sorted(
        (tensor for file in sorted(directory.glob("*.safetensors")) for tensor in _index(file)),
        key=lambda tensor: tensor.name,
    )
    if tensors:
        yield _canonical([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors])
        yield from _samples([tensor for tensor in tensors if not _is_cache_scale(tensor)] or tensors)
        return
    files = sorted(file for pattern in ("*.bin", "*.pt", "*.gguf") for file in directory.glob(pattern))
    if not files:
        raise CallerError(f"no weights (*.safetensors, *.bin, *.pt, *.gguf) in {directory}")
    # Why whole-file samples: these formats have no index that can be read without unpickling.
    for file in files:
        size = file.stat().st_size
        yield _canonical(size)
        yield from (_read(file, size * i // _NUM_SAMPLES, _SAMPLE_BYTES) for i in range(_NUM_SAMPLES))


def _index(file: Path) -> list[_Tensor]:
    with file.open("rb") as stream:
        (header_bytes,) = struct.unpack("<Q", stream.read(8))
        if header_bytes > _MAX_HEADER_BYTES:
            raise CallerError(f"{file}: header of {header_bytes} bytes, at most {_MAX_HEADER_BYTES} are believed")
        header = json.loads(stream.read(header_bytes))
    base = 8 + header_bytes
    return [
        _Tensor(name, entry["dtype"], tuple(entry["shape"]), file, base + start, stop - start)
        for name, entry in header.items()
        if name != "__metadata__"
        for start, stop in [entry["data_offsets"]]
    ]


def _is_cache_scale(tensor: _Tensor) -> bool:
    return math.prod(tensor.shape) == 1 and _CACHE_SCALE.search(tensor.name) is not None


def _samples(tensors: list[_Tensor]) -> Iterator[bytes]:
    """Spread evenly over the tensors, at a place inside each that differs from one to the next."""
    for i in range(_NUM_SAMPLES):
        tensor = tensors[i * len(tensors) // _NUM_SAMPLES]
        room = max(0, tensor.num_bytes - _SAMPLE_BYTES)
        yield _read(tensor.file, tensor.start + room * i // _NUM_SAMPLES, min(tensor.num_bytes, _SAMPLE_BYTES))


def _read(file: Path, offset: int, num_bytes: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(num_bytes)
