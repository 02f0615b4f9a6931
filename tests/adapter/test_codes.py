"""Caches of 8-bit codes in vLLM: what their layers must tell, how the bytes are read, what is refused. No engine."""

from types import SimpleNamespace

import msgspec
import pytest
import torch

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import Span
from kv_transfer.plan.cache_state import LATENT, ParallelLayout, Share

pytest.importorskip("vllm")
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kv_engine_adapter.config import ferry_config
from kv_engine_adapter.vllm import setup
from kv_engine_adapter.vllm.codes import Codes, codes_of, refuse_packed
from kv_engine_adapter.vllm.groups import ModelCaches, model_caches
from kv_engine_adapter.vllm.tensors import engine_caches

pytestmark = [pytest.mark.vllm]
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
TYPES = {"fp8": E4M3, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2}
WIDE = ("auto", "bfloat16", "float16", "float32")
BLOCKS, HEADS, TOKENS, SIZE = 3, 2, 4, 8
SHARE = Share(Rank(0), Span(0, 2), Span(0, HEADS))


def name_of(number):
    return f"model.layers.{number}.self_attn.attn"


def layer(key=1.0, value=1.0, **fields):
    """An attention layer of vLLM's, as far as it is looked at."""
    scales = {"_k_scale": torch.tensor(key), "_v_scale": torch.tensor(value)}
    numbers = {"_k_scale_float": key, "_v_scale_float": value}
    return SimpleNamespace(**(scales | numbers | {"kv_cache_dtype": "fp8", "quant_config": None} | fields))


def engine(*layers, **cache):
    forward = {name_of(number): each for number, each in enumerate(layers)}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=forward),
        model_config=SimpleNamespace(dtype=torch.float32),
        cache_config=SimpleNamespace(**({"cache_dtype": "fp8"} | cache)),
    )


def tensors(*numbers, dtype=torch.uint8):
    return {name_of(number): torch.zeros(BLOCKS, 2, TOKENS, HEADS, SIZE, dtype=dtype) for number in numbers}


# -- what the layers tell ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", TYPES)
def test_codes_have_the_scales_of_their_layers(declared):
    """In the order of layers, whatever the order of the tensors: layer 10 comes after layer 9."""
    layers = [layer(0.5 + number, 1 / (number + 3), kv_cache_dtype=declared) for number in range(11)]
    found = codes_of(engine(*layers), tensors(*reversed(range(11))))
    assert found.dtype == TYPES[declared]
    exact = torch.tensor([[0.5 + number, 1 / (number + 3)] for number in range(11)]).flatten().tolist()
    assert found.scales == tuple(exact)


def test_scales_with_an_axis_of_one_are_one_number():
    """As compressed-tensors keeps them."""
    scales = {"_k_scale": torch.tensor([0.25]), "_v_scale": torch.tensor([[4.0]])}
    scheme = SimpleNamespace(kv_cache_scheme={"strategy": "tensor"})
    found = codes_of(engine(layer(0.25, 4.0, quant_config=scheme, **scales)), tensors(0))
    assert found.scales == (0.25, 4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_caches_of_numbers_have_no_codes_and_their_layers_are_not_asked(dtype):
    assert codes_of(SimpleNamespace(), tensors(0, 1, dtype=dtype)) is None


TWO = torch.tensor([1.0, 2.0])
BY_HEAD = SimpleNamespace(kv_cache_scheme={"strategy": "attn_head"})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"_k_scale": TWO}, r"one scale for K of a layer: layer=model\.layers\.1\.\S+ got=2 on this rank, supported=1"),
        ({"_v_scale": TWO}, r"one scale for V of a layer: layer=model\.layers\.1\.\S+ got=2 on this rank"),
        ({"quant_config": BY_HEAD}, r"one scale for K of a layer: .*got=one for each head \(attn_head\), supported=1"),
        ({"_k_scale": None}, r"does not tell the scale of its codes: layer=model\.layers\.1\.\S+ missing=K"),
        ({"_v_scale_float": None}, "missing=V"),
        ({"_v_scale_float": 2.0}, r"two scales for V: layer=\S+ on its device=1, on the host=2"),
        ({"calculate_kv_scales": True}, "fixed before the first token: calculate_kv_scales=True, supported is False"),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "one type for all layers: kv_cache_dtype=fp8 and fp8_e5m2, supported is one of",
        ),
        ({"kv_cache_dtype": "auto"}, "one type for all layers: kv_cache_dtype=auto and fp8"),
    ],
)
def test_layers_that_are_refused(fields, words):
    with pytest.raises(CallerError, match=words):
        codes_of(engine(layer(), layer(**fields)), tensors(0, 1))


@pytest.mark.parametrize("declared", ["fp8_inc", "fp8_ds_mla", "int8_per_token_head"])
def test_bytes_of_another_kind_are_refused(declared):
    with pytest.raises(CallerError, match=f"kv_cache_dtype={declared}, supported is one of fp8, fp8_e4m3, fp8_e5m2"):
        codes_of(engine(layer(kv_cache_dtype=declared)), tensors(0))


def test_codes_of_another_device_are_refused(monkeypatch):
    """The same names stand for other types on some GPUs."""
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_fp8_fnuz=lambda: True))
    with pytest.raises(CallerError, match=r"got=those of this GPU \(fnuz\)"):
        codes_of(engine(layer()), tensors(0))


# -- what the configuration tells --------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [*WIDE, *TYPES])
def test_types_that_are_carried(declared):
    refuse_packed(SimpleNamespace(cache_dtype=declared, calculate_kv_scales=False))


PACKED = ["fp8_ds_mla", "fp8_inc", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "turboquant_k8v4"]


@pytest.mark.parametrize("declared", PACKED)
def test_packed_types_are_refused(declared):
    with pytest.raises(CallerError, match=f"kv_cache_dtype={declared}, supported are auto, bfloat16, .*fp8_e5m2"):
        refuse_packed(SimpleNamespace(cache_dtype=declared))


@pytest.mark.parametrize("declared", TYPES)
def test_scales_that_are_computed_while_serving_are_refused(declared):
    with pytest.raises(CallerError, match="calculate_kv_scales=True, supported is False"):
        refuse_packed(SimpleNamespace(cache_dtype=declared, calculate_kv_scales=True))
    refuse_packed(SimpleNamespace(cache_dtype="auto", calculate_kv_scales=True))


# -- groups ------------------------------------------------------------------------------------------------------------

BYTES = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": SIZE, "dtype": torch.uint8}


def carried(*specs):
    groups = [SimpleNamespace(kv_cache_spec=each) for each in specs]
    return model_caches(SimpleNamespace(kv_cache_groups=groups), can_fail_requests=True)


def test_groups_of_codes_are_carried():
    codes = BYTES | {"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
    assert carried(FullAttentionSpec(**codes), SlidingWindowSpec(**codes, sliding_window=6)).windows == (0, 6)


@pytest.mark.parametrize("mode", [mode for mode in KVQuantMode if mode > KVQuantMode.FP8_PER_TENSOR])
def test_groups_of_packed_elements_are_refused(mode):
    with pytest.raises(CallerError, match=f"kv_quant_mode: got={mode:d}, supported=0"):
        carried(FullAttentionSpec(**BYTES, kv_quant_mode=mode))


def test_latent_rows_of_codes_are_refused():
    row = BYTES | {"num_kv_heads": 1, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
    assert carried(MLAAttentionSpec(**row | {"kv_quant_mode": KVQuantMode.NONE})).attention == LATENT
    with pytest.raises(CallerError, match="kv_quant_mode: got=1, supported=0"):
        carried(MLAAttentionSpec(**row))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_layers_that_keep_numbers_beside_layers_of_codes_are_refused(dtype):
    """vLLM's `kv_cache_dtype_skip_layers`: in groups of their own, or in one."""
    codes = FullAttentionSpec(**BYTES, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    numbers = FullAttentionSpec(**BYTES | {"dtype": dtype})
    words = "kv_quant_mode: got=0 and 1" if dtype == torch.uint8 else "dtype: got=torch.float32 and torch.uint8"
    with pytest.raises(CallerError, match=words):
        carried(codes, numbers)
    with pytest.raises(CallerError, match=words):
        carried(UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs={"0": codes, "1": numbers}))


# -- bytes as elements -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_engines_bytes_are_seen_as_elements(dtype):
    registered = tensors(0, 1)
    view = engine_caches(registered, ModelCaches(HEADS, SIZE, TOKENS), SHARE, Codes(dtype, (1.0,) * 4, torch.float32))
    assert (view.dtype, {plane.dtype for plane in view.caches.planes}) == (dtype, {getattr(torch, dtype)})
    view.caches.planes[3][2, 1, 1, 5] = 1.5
    expected = torch.tensor(1.5).to(getattr(torch, dtype)).view(torch.uint8)
    assert registered[name_of(1)][2, 1, 1, 1, 5] == expected, "the same memory"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2])
def test_bytes_that_are_not_of_the_declared_type_are_refused(dtype):
    told = ModelCaches(HEADS, SIZE, TOKENS)
    with pytest.raises(CallerError, match=f"tensor={dtype}, declared={E4M3}"):
        engine_caches(tensors(0, 1, dtype=dtype), told, SHARE, Codes(E4M3, (1.0,) * 4, torch.float32))


def test_how_a_block_is_packed_on_a_cpu_follows_from_the_type_that_is_computed_in(monkeypatch):
    """vLLM asks so, and packs for AMX where the model is of bfloat16, also if the cache holds codes."""
    asked = []

    def isa(dtype, tokens, size):
        asked.append(dtype)
        return "amx"

    monkeypatch.setattr("vllm.v1.attention.backends.cpu_attn._get_attn_isa", isa)
    registered = {name_of(number): torch.zeros(BLOCKS, HEADS, 32, 2 * SIZE, dtype=torch.uint8) for number in (0, 1)}
    codes = Codes(E4M3, (1.0,) * 4, torch.bfloat16)
    view = engine_caches(registered, ModelCaches(HEADS, SIZE, 32), SHARE, codes)
    assert (asked, view.layout.tile) == ([torch.bfloat16], "vllm-cpu-amx")
    assert view.caches.planes[0].dtype == torch.float8_e4m3fn


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="vLLM writes codes on processors with AVX-512 alone"
)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_vllms_cpu_op_makes_of_numbers_are_multiples_of_the_scale(dtype):
    """K and V of its own layout, each with its scale; how it rounds is its own."""
    from vllm import _custom_ops as ops

    tokens, size = 32, 64
    declared = next(word for word, each in TYPES.items() if each == dtype)
    cache = torch.zeros(BLOCKS, HEADS, tokens, 2 * size, dtype=torch.uint8)
    halves = cache.view(BLOCKS, HEADS, 2 * tokens, size).chunk(2, dim=2)
    given = [torch.randn(tokens, HEADS, size, generator=torch.Generator().manual_seed(kind)) for kind in (0, 1)]
    slots, scales = torch.arange(tokens, 2 * tokens), (0.3, 0.07)
    ops.cpu_attn_reshape_and_cache(
        *given, *halves, slots, "vec", k_scale=scales[0], v_scale=scales[1], kv_cache_dtype=declared
    )
    codes = codes_of(engine(layer(*scales, kv_cache_dtype=declared)), {name_of(0): cache})
    share = Share(Rank(0), Span(0, 1), Span(0, HEADS))
    view = engine_caches({name_of(0): cache}, ModelCaches(HEADS, size, tokens), share, codes)
    step = torch.finfo(getattr(torch, dtype)).eps
    for plane, scale, numbers in zip(view.caches.planes, codes.scales, given, strict=True):
        value = plane[1].float() * scale
        small = scale * torch.finfo(getattr(torch, dtype)).smallest_normal
        assert ((value - numbers).abs() <= step * numbers.abs() + small).all()
        assert value.any()


# -- what peers are told -----------------------------------------------------------------------------------------------


class Stages:
    """The group of a pipeline, of which the ranks know different things."""

    def __init__(self, *told):
        self.told, self.world_size = told, len(told)

    def broadcast_object(self, own, src):
        return self.told[src]


def state_of(monkeypatch, stages, codes, num_layers):
    monkeypatch.setattr("vllm.distributed.parallel_state.get_pp_group", lambda: stages)
    monkeypatch.setattr("kv_engine_adapter.vllm.translate.fingerprint", lambda config: "f")
    worker = object.__new__(setup.WorkerSetup)
    worker._model, worker._config = ModelCaches(HEADS, SIZE, TOKENS), None
    worker._ferry = ferry_config({"convert_elements": True})
    view = engine_caches(tensors(0, 1), worker._model, SHARE, codes)
    return worker._state(view, ParallelLayout.even(1, [num_layers], HEADS), codes)


def test_peers_are_told_the_scales_of_all_stages(monkeypatch):
    own, others = (0.5, 0.25, 2.0, 4.0), (8.0, 16.0)
    state = state_of(monkeypatch, Stages(own, others), Codes(E5M2, own, torch.float32), num_layers=3)
    assert (state.dtype, state.scales, state.convert_elements) == (E5M2, (*own, *others), True)
    assert state.scales_of(Span(1, 3)) == (2.0, 4.0, 8.0, 16.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=type(state)) == state


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_are_no_positive_numbers_are_refused(monkeypatch, scale):
    """-1 stands in vLLM for a scale that was not loaded."""
    own = (1.0, 1.0, scale, 1.0)
    with pytest.raises(CallerError, match="a scale is not a positive number"):
        state_of(monkeypatch, Stages(own), Codes(E4M3, own, torch.float32), num_layers=2)
