"""Makes the tiny checkpoints on which whole engines are tested: a Llama, and one for each other kind of cache.

In:  a directory and a seed; two seeds give two checkpoints of one shape with different weights.
Out: the directory with config, weights, tokenizer and chat template, as Hugging Face and vLLM load them.
Law: the same seed gives the same bytes; a directory is complete or absent, also when several processes make it at once.

Usage: .venv/bin/python tools/model/make_tiny.py [--seed 0] [--kind llama] [--out .work/models/tiny-seed0]
"""

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors.numpy import save

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # so that it runs as a script and imports as `model.make_tiny`

from model.tiny_chunks import ChunkShape, chunk_config, chunk_weights  # noqa: E402
from model.tiny_codes import CodesShape, codes_config, codes_weights  # noqa: E402
from model.tiny_hybrid import ONLY_WINDOWS, HybridShape, hybrid_config, hybrid_weights  # noqa: E402
from model.tiny_latent import LatentShape, latent_config, latent_weights  # noqa: E402
from model.tiny_tokenizer import (  # noqa: E402
    BOS,
    EOS,
    FIRST_SPOKEN,
    PAD,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    tokenizer_config_json,
    tokenizer_json,
)
from model.tiny_weights import TinyShape, Weights, tiny_weights  # noqa: E402

Shape = TinyShape | HybridShape | ChunkShape | LatentShape | CodesShape
SHAPE = TinyShape(vocab_size=VOCAB_SIZE)
SHAPES: Mapping[str, Shape] = {
    "llama": SHAPE,
    "hybrid": HybridShape(vocab_size=VOCAB_SIZE),
    "windows": ONLY_WINDOWS,
    "chunks": ChunkShape(SHAPE),
    "latent": LatentShape(vocab_size=VOCAB_SIZE),
    "codes": CodesShape(SHAPE),
    "rescaled": CodesShape(SHAPE, key_scale=0.03),
}
RECIPE_VERSION = 1
_RECIPE_FILE = "recipe.json"


def default_directory(seed: int, shape: Shape = SHAPE) -> Path:
    kind = next((f"{kind}-" for kind, known in SHAPES.items() if known == shape != SHAPE), "")
    return ROOT / ".work" / "models" / f"tiny-{kind}seed{seed}"


def make_tiny(seed: int = 0, directory: Path | None = None, shape: Shape = SHAPE) -> Path:
    """The directory of the checkpoint, made now unless it is there already."""
    target = directory or default_directory(seed, shape)
    recipe = _recipe(seed, shape)
    if not _holds(target, recipe):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tiny-") as scratch:
            _write(Path(scratch, "model"), seed, shape, recipe)
            _put_in_place(Path(scratch, "model"), target, recipe)
    return target


def _holds(target: Path, recipe: str) -> bool:
    found = target / _RECIPE_FILE
    return found.is_file() and found.read_text() == recipe


def _put_in_place(made: Path, target: Path, recipe: str) -> None:
    """Renames `made` to `target`; another process may have been faster, which is as good."""
    if target.exists() and not _holds(target, recipe):
        if any(target.iterdir()) and not (target / _RECIPE_FILE).exists():
            raise SystemExit(f"{target} holds something that is not a tiny model; choose another --out")
        shutil.rmtree(target)
    try:
        made.rename(target)
    except OSError:
        if not _holds(target, recipe):
            raise


def _write(folder: Path, seed: int, shape: Shape, recipe: str) -> None:
    folder.mkdir()
    weights = _weights(shape, seed)
    Path(folder, "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    Path(folder, "config.json").write_text(_json(_config(shape)))
    Path(folder, "generation_config.json").write_text(_json(_special_ids() | {"do_sample": False}))
    Path(folder, "tokenizer.json").write_text(tokenizer_json())
    Path(folder, "tokenizer_config.json").write_text(tokenizer_config_json(shape.max_position))
    Path(folder, _RECIPE_FILE).write_text(recipe)


def _weights(shape: Shape, seed: int) -> Weights:
    silent = range(FIRST_SPOKEN)
    match shape:
        case HybridShape():
            return hybrid_weights(shape, seed, silent)
        case ChunkShape():
            return chunk_weights(shape, seed, silent)
        case LatentShape():
            return latent_weights(shape, seed, silent)
        case CodesShape():
            return codes_weights(shape, seed, silent)
    return tiny_weights(shape, seed, silent)


def _config(shape: Shape) -> dict[str, object]:
    match shape:
        case HybridShape():
            return _special_ids() | hybrid_config(shape)
        case ChunkShape():
            return _special_ids() | chunk_config(shape)
        case LatentShape():
            return _special_ids() | latent_config(shape)
        case CodesShape():
            return _special_ids() | _llama_config(shape.llama) | codes_config()
    return _special_ids() | _llama_config(shape)


def _llama_config(shape: TinyShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.max_position,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _special_ids() -> dict[str, object]:
    return {
        f"{name}_token_id": SPECIAL_TOKENS.index(token) for name, token in [("bos", BOS), ("eos", EOS), ("pad", PAD)]
    }


def _recipe(seed: int, shape: Shape) -> str:
    scales = {"scales": dataclasses.asdict(shape)} if isinstance(shape, CodesShape) else {}
    return _json({"version": RECIPE_VERSION, "seed": seed, "config": _config(shape), **scales})


def _json(value: dict[str, object]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny checkpoint used by tests and demo.")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other weights of the same shape")
    parser.add_argument("--kind", choices=SHAPES, default="llama", help="which attention its layers have")
    parser.add_argument("--out", type=Path, default=None, help="directory (default: one below .work/models)")
    arguments = parser.parse_args()
    print(make_tiny(arguments.seed, arguments.out, SHAPES[arguments.kind]))


if __name__ == "__main__":
    main()
