"""CacheSpec: byte counts and groups against sums written out."""

import pytest

from kv_core.errors import CallerError
from kv_core.spec import ELEMENT_BYTES, CacheSpec, LayerSpec, element_bytes


def test_bytes_of_an_eight_billion_model():
    spec = CacheSpec.uniform(num_layers=32, num_heads=8, head_size=128, dtype="bfloat16", tokens_per_block=16)
    assert spec.bytes_per_token == 32 * 2 * 8 * 128 * 2 == 131072
    assert spec.bytes_per_block == 2 * 1024 * 1024


def test_a_latent_cache_has_one_plane():
    spec = CacheSpec.uniform(
        num_layers=2, num_heads=1, head_size=576, dtype="float8_e4m3fn", tokens_per_block=64, num_planes=1
    )
    assert spec.bytes_per_token == 2 * 576


def test_layers_may_differ():
    layers = (LayerSpec(8, 128, 2, "bfloat16"), LayerSpec(2, 64, 2, "float32", window=512))
    assert CacheSpec(layers, 32).bytes_per_token == 2 * 8 * 128 * 2 + 2 * 2 * 64 * 4


def test_windows_are_cycled_over_the_layers():
    spec = CacheSpec.uniform(
        num_layers=7, num_heads=1, head_size=8, dtype="float16", tokens_per_block=4, windows=[512, 512, 4096]
    )
    assert spec.groups() == {512: (0, 1, 3, 4, 6), 4096: (2, 5)}
    assert list(spec.groups()) == [512, 4096]


def test_full_attention_is_the_last_group():
    spec = CacheSpec.uniform(
        num_layers=5, num_heads=1, head_size=8, dtype="float16", tokens_per_block=4, windows=[None, 128, 64]
    )
    assert list(spec.groups().items()) == [(64, (2,)), (128, (1, 4)), (None, (0, 3))]


def test_specs_are_values():
    one, other = (
        CacheSpec.uniform(num_layers=2, num_heads=4, head_size=8, dtype="int8", tokens_per_block=4) for _ in range(2)
    )
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize("field", ["num_heads", "head_size", "num_planes", "window"])
def test_a_size_below_one_is_refused(field):
    sizes = {"num_heads": 1, "head_size": 1, "num_planes": 1, "window": 1} | {field: 0}
    with pytest.raises(CallerError, match=f"{field}=0"):
        LayerSpec(dtype="float16", **sizes)


def test_an_empty_cache_is_refused():
    with pytest.raises(CallerError, match="layers=0"):
        CacheSpec((), 16)
    with pytest.raises(CallerError, match="tokens_per_block=0"):
        CacheSpec((LayerSpec(1, 1, 1, "int8"),), 0)
    with pytest.raises(CallerError, match="windows is empty"):
        CacheSpec.uniform(num_layers=1, num_heads=1, head_size=1, dtype="int8", tokens_per_block=1, windows=[])


def test_an_unknown_dtype_is_named_beside_the_known_ones():
    with pytest.raises(CallerError, match=r"float32.*theirs='float4'"):
        element_bytes("float4")
    with pytest.raises(CallerError, match="theirs='complex64'"):
        LayerSpec(1, 1, 1, "complex64")


def test_element_sizes_are_those_of_torch():
    torch = pytest.importorskip("torch")
    assert {name: getattr(torch, name).itemsize for name in ELEMENT_BYTES} == dict(ELEMENT_BYTES)
