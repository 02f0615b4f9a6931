"""Which cache groups a model of vLLM has, and whether we carry them.

In:  vLLM's KV cache configuration: for each group its layers and what is kept of them.
Out: `ModelCaches`: what the groups have in common, and the window of each.
Law: what we cannot carry is refused with what was got and what is supported. Groups may differ in their windows and in
their layers, in nothing else: layers of several groups share one memory, and a block of it is of one group at a time.

A window is what vLLM keeps of a group, which is not always what its layers see: with its hybrid manager switched off
it keeps all tokens of layers with windows too, and serves them from its prefix cache, so all of them are carried.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_core.errors import CallerError
from kv_transfer.plan.cache_state import FULL, LATENT

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec

_WINDOWS = {"SlidingWindowSpec": "sliding_window", "ChunkedLocalAttentionSpec": "attention_chunk_size"}
_ATTENTION = {"FullAttentionSpec": FULL, "MLAAttentionSpec": LATENT, **dict.fromkeys(_WINDOWS, FULL)}
"""By the very class: those derived from these (sinks, reference windows, hidden states) keep something else."""

_PLAIN_SPEC = {
    "kv_quant_mode": 0,
    "tokens_per_state": 1,
    "compress_ratio": 1,
    "extra_retained_tokens": 0,
    "model_version": None,
}
"""What a specification says of a cache that has one slot for each token and head; versions have some of these."""

_CODES = 1
"""The `kv_quant_mode` of codes of 8 bits with scales of layers. Of latent rows it also stands for packed formats."""


@dataclass(frozen=True, slots=True)
class ModelCaches:
    """What a rank keeps of each token, and for how long; `block_size` is the scheduler's, in tokens.

    `windows` has for each group how many tokens are kept, 0 for all; they slide, or are chunks of that many tokens.
    `group_of` has the groups of layers by name; those it does not name are of the first.
    """

    num_kv_heads: int
    head_size: int
    block_size: int
    attention: str = FULL
    windows: tuple[int, ...] = (0,)
    is_chunked: bool = False
    group_of: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_latent(self) -> bool:
        return self.attention == LATENT

    @property
    def num_planes(self) -> int:
        """K and V, or one latent row."""
        return 1 if self.is_latent else 2


def model_caches(
    kv_cache_config: "KVCacheConfig", *, can_fail_requests: bool, can_mix_windows: bool = True
) -> ModelCaches:
    """What is kept for the model; `CallerError` if it is not ours to carry.

    `can_fail_requests`: the engine can be told of a failed load by request. Told by blocks it computes again from the
    first bad one on, though a window before that is gone.
    `can_mix_windows`: the engine computes layers with and without a window rightly in one group, as it keeps them when
    its hybrid manager is off.
    """
    groups = kv_cache_config.kv_cache_groups
    specs = [spec_of(group.kv_cache_spec) for group in groups]
    _check_kinds([type(spec).__name__ for spec in specs])
    for spec in specs:
        _check_plain(spec)
    _check_alike(specs)
    windows = tuple(int(getattr(spec, _WINDOWS.get(type(spec).__name__, ""), 0)) for spec in specs)
    if any(windows) and not can_fail_requests:
        raise CallerError(
            "FerryConnector carries windows if failed loads can be told by request: got=this vLLM tells them by block, "
            "supported=vLLM 0.30 and later"
        )
    if not can_mix_windows and any(getattr(spec, "sliding_window", None) for spec in specs):
        raise CallerError(
            "FerryConnector is not to be the reason of wrong answers: got=this vLLM for CPUs gives all layers "
            "the window of some when its hybrid cache manager is off, supported=vLLM 0.30 and later"
        )
    return ModelCaches(
        num_kv_heads=specs[0].num_kv_heads,
        head_size=specs[0].head_size,
        block_size=specs[0].block_size,
        attention=_ATTENTION[type(specs[0]).__name__],
        windows=windows,
        is_chunked=any(type(spec).__name__ == "ChunkedLocalAttentionSpec" for spec in specs),
        group_of={name: number for number, group in enumerate(groups) for name in getattr(group, "layer_names", ())},
    )


def spec_of(spec: "KVCacheSpec") -> "AttentionSpec":
    """The one specification of all layers of a group; vLLM keeps one a layer where they are kept alike but differ."""
    by_layer: Mapping[str, AttentionSpec] = getattr(spec, "kv_cache_specs", {"": spec})
    first, *others = by_layer.values()
    for other in others:
        _check_equal([first, other], ("block_size", "num_kv_heads", "head_size", "dtype", "kv_quant_mode"))
    return first


def _check_kinds(kinds: list[str]) -> None:
    if not kinds or not set(kinds) <= set(_ATTENTION) or len({_ATTENTION[kind] for kind in kinds}) > 1:
        latent = next(kind for kind, attention in _ATTENTION.items() if attention == LATENT)
        supported = f"any of {[kind for kind in _ATTENTION if kind != latent]}, or {latent} alone"
        raise CallerError(f"FerryConnector does not carry these KV cache groups: got={kinds}, supported={supported}")
    if set(_WINDOWS) <= set(kinds):
        raise CallerError(f"FerryConnector carries one kind of window: got={kinds}, supported=one of {[*_WINDOWS]}")


def _check_plain(spec: "AttentionSpec") -> None:
    has_codes = _ATTENTION[type(spec).__name__] == FULL
    for name, usual in _PLAIN_SPEC.items():
        if has_codes and (name, getattr(spec, name, usual)) == ("kv_quant_mode", _CODES):
            continue
        if (got := getattr(spec, name, usual) or usual) != usual:
            raise CallerError(f"FerryConnector carries plain caches: {name}: got={got}, supported={usual}")
    if (role := str(getattr(spec, "cache_role", "sparse")).rpartition(".")[2].lower()) != "sparse":
        raise CallerError(f"FerryConnector carries no cache beside the model's: cache_role: got={role}")
    values = getattr(spec, "head_size_v", None) or spec.head_size
    if values != spec.head_size:
        raise CallerError(f"FerryConnector carries K and V of one size: K={spec.head_size}, V={values}")


def _check_alike(specs: list["AttentionSpec"]) -> None:
    _check_equal(specs, ("num_kv_heads", "head_size", "dtype", "kv_quant_mode", "block_size"))


def _check_equal(specs: Iterable["AttentionSpec"], names: tuple[str, ...]) -> None:
    for name in names:
        if len(got := {str(getattr(spec, name)) for spec in specs}) > 1:
            raise CallerError(f"FerryConnector carries layers of one shape: {name}: got={' and '.join(sorted(got))}")
