"""The shape of an engine, as a person writes it in one word.

In:  such a word, and the facts of a model.
Out: the CacheState of that engine.
Law: sizes come first, in any order and each at most once; everything else has a name. What is not said is 1, or usual.

    tp4pp2
    tp8cp2,cut=round_robin,deal=2 cp: context ranks, to which the blocks of a sequence are dealt, so many at a time
    tp4dp2                        dp: groups of attention data parallelism
    tp2,stages=20+12              layers of each pipeline stage, when they are not even
    tp1,block=64,order=token_major,dtype=float16
    tp1,dtype=float8_e4m3fn,scale=0.5+0.25,convert=yes    scales of K and V; asks for conversion
"""

import re
from typing import Any, Final, get_args

import msgspec

from kv_core.errors import CallerError
from kv_engine_adapter.cli.model_facts import ModelFacts, count
from kv_transfer.plan.cache_state import (
    MAX_LAYERS,
    MAX_RANKS,
    MAX_TOKENS_PER_BLOCK,
    BlockOrder,
    CacheState,
    ParallelLayout,
)

_SIZES: Final = ("tp", "pp", "cp", "dp")
_NAMES: Final = ("stages", "block", "order", "dtype", "cut", "deal", "numbering", "model", "scale", "convert")


def cache_state(word: str, model: ModelFacts) -> CacheState:
    """The state that an engine of this shape would tell; CallerError names what cannot be read or cannot be."""
    first, *named = word.split(",")
    sizes, options = _sizes(first), _options(named)
    stages = _stages(options.get("stages"), sizes["pp"], model.num_layers)
    cut = {"context_cut": options["cut"]} if "cut" in options else {}
    numbering = {"numbering": options["numbering"]} if "numbering" in options else {}
    parallel = ParallelLayout.even(
        sizes["tp"],
        stages,
        model.num_kv_heads,
        cp=sizes["cp"],
        groups=sizes["dp"],
        blocks_per_deal=count("deal", options.get("deal", "1"), MAX_TOKENS_PER_BLOCK),
        **cut,  # type: ignore[arg-type]
        **numbering,  # type: ignore[arg-type]
    )
    state = {
        "fingerprint": options.get("model", model.name),
        "attention": model.attention,
        "dtype": options.get("dtype", model.dtype),
        "head_size": model.head_size,
        "num_planes": model.num_planes,
        "num_layers": model.num_layers,
        "num_kv_heads": model.num_kv_heads,
        "tokens_per_block": count("block", options.get("block", "16"), MAX_TOKENS_PER_BLOCK),
        "layout": {"order": options.get("order", get_args(BlockOrder)[0])},
        "parallel": msgspec.to_builtins(parallel),
        "windows": model.windows,
        "chunked": model.chunked,
        "scales": _scales(options.get("scale")),
        "convert_elements": _is_yes("convert", options.get("convert", "no")),
    }
    return _checked(word, state)


def _checked(word: str, fields: dict[str, Any]) -> CacheState:
    try:
        return msgspec.convert(fields, CacheState)
    except msgspec.ValidationError as error:
        raise CallerError(f"no such engine: got={word!r}: {error}") from error


def _sizes(word: str) -> dict[str, int]:
    found = re.findall(r"([a-z]+)(\d+)", word)
    names = [name for name, _ in found]
    if "".join(name + number for name, number in found) != word or not set(names) <= set(_SIZES) or not names:
        raise CallerError(
            f"not the sizes of an engine: got={word!r}, wanted=for example tp4pp2, of {', '.join(_SIZES)}"
        )
    if len(set(names)) != len(names):
        raise CallerError(f"a size is given twice: got={word!r}")
    return dict.fromkeys(_SIZES, 1) | {name: count(name, number, MAX_RANKS) for name, number in found}


def _options(words: list[str]) -> dict[str, str]:
    options = dict(word.split("=", 1) for word in words if "=" in word)
    if len(options) != len(words) or not set(options) <= set(_NAMES):
        raise CallerError(f"not options of an engine: got={words}, wanted=name=value, of {', '.join(_NAMES)}")
    return options


def _stages(text: str | None, pp: int, num_layers: int) -> list[int]:
    if text is None:
        return [num_layers // pp + (stage < num_layers % pp) for stage in range(pp)]
    stages = [count("stages", word, MAX_LAYERS) if word != "0" else 0 for word in text.split("+")]
    if sum(stages) != num_layers or pp not in (1, len(stages)):
        raise CallerError(f"stages do not hold the layers: got={text!r}, pp={pp}, layers={num_layers}")
    return stages


def _scales(text: str | None) -> list[float]:
    try:
        return [] if text is None else [float(word) for word in text.split("+")]
    except ValueError as error:
        raise CallerError(f"scale is not numbers: got={text!r}, wanted=for example 0.5 or 0.5+0.25") from error


def _is_yes(name: str, text: str) -> bool:
    if text not in ("yes", "no"):
        raise CallerError(f"{name} is neither yes nor no: got={text!r}")
    return text == "yes"
