"""Conversion against torch's own, over every code of the narrow types, and against nearest values found by search."""

import itertools

import pytest
import torch

from kv_kernels.convert import convert

TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def every_element(dtype):
    """[2, 1, 1, n]: all elements of a narrow type; of float32 those about every border of the others."""
    if dtype.itemsize < 4:
        found = torch.arange(256**dtype.itemsize, dtype=torch.int64).to(WORDS[dtype.itemsize]).view(dtype)
    else:
        borders = torch.cat([every_element(narrow).flatten().float() for narrow in (*CODES, torch.float16)])
        found = torch.cat(
            [borders, borders * (1 + 2**-20), borders * (1 - 2**-20), torch.tensor([1e38, -1e-40, 3e-39])]
        )
    return found.repeat(2, 1, 1, 1)


def same(ours, theirs):
    """Bit by bit, but for the payload of NaN."""
    is_nan = ours.float().isnan()
    word = WORDS[ours.itemsize]
    return torch.equal(is_nan, theirs.float().isnan()) and torch.equal(
        ours.view(word)[~is_nan], theirs.view(word)[~is_nan]
    )


@pytest.mark.parametrize(("source", "target"), list(itertools.product(TYPES, TYPES)), ids=str)
def test_without_scales_it_is_what_torch_does(source, target):
    src = every_element(source)
    before = src.clone()
    out = convert(src, target)
    assert (out.dtype, out.shape) == (target, src.shape)
    assert same(out, src.to(target))
    assert same(src, before), "the source is left as it was"


@pytest.mark.parametrize("target", CODES, ids=str)
def test_codes_are_the_nearest_values_ties_to_even_and_saturate(target):
    """Found by looking through all values of the type, not by anybody's conversion."""
    codes = torch.arange(128, dtype=torch.uint8)
    values = codes.view(target).float()
    finite = values[values.isfinite()].double()
    src = every_element(torch.float16).float()
    src = src[:, :, :, src[0, 0, 0].isfinite() & (src[0, 0, 0].abs() <= finite.max())]
    distance = (src.double().abs()[..., None] - finite).abs()
    nearest = distance.min(dim=-1, keepdim=True).values
    candidates = torch.where(distance == nearest, torch.arange(len(finite)), 1 << 20)
    first = candidates.min(dim=-1).values
    is_tie = (distance == nearest).sum(dim=-1) == 2
    code = first + (is_tie & (first % 2 == 1)).long()
    assert bool(is_tie.any()), "ties are among them"
    assert same(convert(src, target), torch.copysign(finite[code].float(), src).to(target))
    beyond = convert(torch.tensor([465.0, -1e6, float("inf"), 1e5]).view(1, 1, 1, 4), target).float().flatten().tolist()
    infinite = float("inf")
    assert beyond == ([448.0, -448.0, 448.0, 448.0] if target is CODES[0] else [448.0, -infinite, infinite, infinite])


@pytest.mark.parametrize(("source", "target"), list(itertools.product(TYPES, TYPES)), ids=str)
def test_scales_are_of_each_plane(source, target):
    src = every_element(source)
    before = [0.37, 8.0] if source in CODES else None
    after = [0.25, 1.7] if target in CODES else None
    out = convert(src, target, before, after)
    for plane in range(2):
        values = src[plane].float() * (before[plane] if before else 1.0)
        assert same(out[plane], (values / (after[plane] if after else 1.0)).to(target))


@pytest.mark.parametrize("step", [1, 30, 60, 119, 120, 1000])
def test_planes_are_converted_a_few_at_a_time(monkeypatch, step):
    """A plane has 60 elements here; one that is larger than a step goes alone."""
    monkeypatch.setattr("kv_kernels.convert.STEP_ELEMENTS", step)
    src, scales = torch.randn(5, 3, 4, 5).to(torch.bfloat16), [0.5, 1.0, 2.0, 4.0, 0.3]
    out = convert(src, torch.float8_e5m2, None, scales)
    for plane in range(5):
        assert same(out[plane], (src[plane].float() / scales[plane]).to(torch.float8_e5m2))


def test_nothing_is_converted_to_nothing():
    assert convert(torch.zeros(2, 0, 3, 4), torch.float16).shape == (2, 0, 3, 4)


def test_the_strides_of_the_source_are_kept():
    src = torch.randn(2, 3, 5, 4).transpose(1, 2)
    assert convert(src, torch.float16).stride() == src.stride()


def test_scales_that_are_not_one_a_plane_are_refused():
    with pytest.raises(ValueError, match="not one scale a plane: scales=3, planes=2"):
        convert(torch.zeros(2, 1, 1, 1), torch.float16, [1.0, 1.0, 1.0])
