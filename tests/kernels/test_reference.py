"""The torch reference against a model that moves one element at a time."""

from random import Random

import pytest
import torch

from kv_kernels import reference
from kv_kernels.gather import gather
from kv_kernels.layout import select
from kv_kernels.scatter import scatter
from kv_kernels.words import widened
from kv_testing.copies import HEAD_MAJOR, TOKEN_MAJOR, TRANSPOSED, bits, draw_copy, gathered, scattered

MEMORIES = [(TOKEN_MAJOR, TOKEN_MAJOR), (TOKEN_MAJOR, HEAD_MAJOR), (HEAD_MAJOR, TOKEN_MAJOR), (TRANSPOSED, HEAD_MAJOR)]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("memories", MEMORIES)
@pytest.mark.parametrize("seed", range(6))
def test_gather_gives_what_the_model_gives(width, memories, seed):
    copy = draw_copy(Random(seed), width, memories, head_size=(1, 3, 8)[seed % 3])
    before = [bits(plane).clone() for plane in copy.planes]
    route = gather(copy.dense, copy.planes, copy.block_ids, **copy.window)
    assert route == ("reference", width)
    assert bits(copy.dense).tolist() == gathered(copy)
    assert all(torch.equal(bits(plane), old) for plane, old in zip(copy.planes, before, strict=True))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("memories", MEMORIES)
@pytest.mark.parametrize("seed", range(6))
def test_scatter_gives_what_the_model_gives_and_touches_nothing_else(width, memories, seed):
    copy = draw_copy(Random(seed), width, memories, head_size=(1, 3, 8)[seed % 3])
    expected = scattered(copy)
    route = scatter(copy.planes, copy.dense, copy.block_ids, **copy.window)
    assert route == ("reference", width)
    assert all(torch.equal(bits(plane), new) for plane, new in zip(copy.planes, expected, strict=True))


def test_a_selection_has_at_most_three_segments_however_long_it_is():
    plane, dense = torch.zeros(200, 4, 1, 1), torch.zeros(1, 4 * 198 + 2, 1, 1)
    selection = select(dense, [plane], range(200), first_token=3, first_head=0)
    calls = [ids.tolist() for _, ids, _ in reference._pairs(dense, [plane], selection)]
    assert calls == [[0], list(range(1, 199)), [199]]


def test_float8_moves_too():
    plane = torch.arange(24, dtype=torch.uint8).view(3, 2, 2, 2).view(torch.float8_e4m3fn)
    dense = torch.zeros(1, 3, 2, 2, dtype=torch.uint8).view(torch.float8_e4m3fn)
    gather(dense, [plane], [2, 0], first_token=1, first_head=0)
    assert dense.view(torch.uint8).flatten().tolist() == [20, 21, 22, 23, *range(8)]


def test_not_a_number_keeps_its_payload():
    plane = torch.tensor([0x7FA0_1234, -0x0050_4321], dtype=torch.int32).view(torch.float32).view(1, 1, 2, 1)
    dense = torch.zeros(1, 1, 2, 1)
    gather(dense, [plane], [0], first_token=0, first_head=0)
    assert torch.equal(bits(dense), bits(plane))


def test_every_bit_pattern_survives_the_widest_words():
    """Among them all kinds of NaN, as either half of a complex number."""
    halves = torch.arange(1 << 16).to(torch.int16)
    rows = torch.stack([halves.roll(shift) for shift in range(4)], dim=1).repeat(1, 2)
    plane = rows.view(torch.bfloat16).view(1 << 16, 1, 1, 8)
    assert next(widened([plane], [plane]))[0].dtype == torch.complex128
    dense, back = torch.empty_like(plane).view(1, -1, 1, 8), torch.empty_like(plane)
    gather(dense, [plane], range(1 << 16), first_token=0, first_head=0)
    scatter([back], dense, range(1 << 16), first_token=0, first_head=0)
    assert torch.equal(bits(dense).view(-1, 8), rows)
    assert torch.equal(bits(back).view(-1, 8), rows)
