"""Strided views as fewer, wider words: the same bytes at the same places."""

from math import prod
from random import Random

import pytest
import torch

from kv_kernels import words

B, S, H, D = 5, 16, 8, 128


def widened(ours, theirs):
    """Of one pair."""
    return next(words.widened([ours], [theirs]))


def dense(*sizes, dtype=torch.int16):
    return torch.arange(torch.Size(sizes).numel(), dtype=torch.int64).to(dtype).view(sizes)


@pytest.mark.parametrize(
    ("ours", "theirs", "shape"),
    [
        (dense(B, S, H, D), dense(3, S, H, D), (B, S * H * D // 8)),
        (dense(B, H, S, D).transpose(1, 2), dense(3, H, S, D).transpose(1, 2), (B, S * H * D // 8)),
        (dense(B, H, S, D).transpose(1, 2), dense(3, S, H, D), (B, H, S, D // 8)),
        (dense(B, S, H, D)[:, :, 2:6], dense(3, S, 4, D), (B, S, 4 * D // 8)),
        (dense(B, S, H, D)[:, 3:9], dense(3, 6, H, D), (B, 6 * H * D // 8)),
        (dense(B, S, 1, D), dense(3, S, 1, D), (B, S * D // 8)),
    ],
    ids=["token-major", "head-major", "one of each", "half of the heads", "a few slots", "one head"],
)
def test_axes_that_are_one_run_on_both_sides_become_one(ours, theirs, shape):
    wide, other = widened(ours, theirs)
    assert wide.shape == shape
    assert other.shape == (3, *shape[1:])
    assert wide.dtype == other.dtype == torch.complex128


@pytest.mark.parametrize(("head_size", "width"), [(1, 2), (3, 2), (2, 4), (4, 8), (12, 8), (8, 16)])
def test_words_are_as_wide_as_a_row_allows(head_size, width):
    plane = dense(B, S, 2, head_size)[:, :, :1]
    assert widened(plane, dense(3, S, 1, head_size))[0].itemsize == width


@pytest.mark.parametrize("moved", [1, 2, 4])
def test_words_lie_at_multiples_of_their_width(moved):
    plane = dense(B * S * D + moved)[moved:].view(B, S, 1, D)
    assert widened(plane, dense(3, S, 1, D))[0].itemsize == 2 * moved


def test_words_are_as_wide_as_every_pair_allows():
    memory = dense(2, B * S * D + 4)
    planes = [memory[number, :-4].view(B, S, 1, D) for number in range(2)]
    assert [wide.itemsize for wide, _ in words.widened(planes, [dense(3, S, 1, D)] * 2)] == [8, 8]


@pytest.mark.parametrize("seed", range(200))
def test_copies_of_the_wide_views_are_copies_of_the_others(seed):
    dice = Random(seed)
    dtype = dice.choice([torch.uint8, torch.int16, torch.int32, torch.int64])
    ours, theirs = (_drawn(dice, dtype, num, seed) for num in (7, 3))
    size = [min(pair) for pair in zip(ours.shape[1:], theirs.shape[1:], strict=True)]
    ours, theirs = (view[:, : size[0], : size[1], : size[2]] for view in (ours, theirs))
    ids = torch.tensor(dice.sample(range(7), 3))
    expected = ours.clone().index_copy_(0, ids, theirs)
    wide, other = widened(ours, theirs)
    wide.index_copy_(0, ids, other)
    assert torch.equal(ours, expected)


def _drawn(dice, dtype, num_blocks, seed):
    """[num_blocks, T, H, D] with axes in any order in memory, and room between them."""
    sizes = [num_blocks, *(dice.choice([1, 2, 3, 8]) for _ in range(3))]
    order = dice.sample(range(4), 4) if dice.random() < 0.3 else dice.choice([[0, 1, 2, 3], [0, 2, 1, 3]])
    roomy = [sizes[axis] + dice.choice([0, 0, 1]) for axis in order]
    # Bytes of two values: among the widest words are then NaNs of every kind, whose bits arithmetic would change.
    drawn = torch.randint(0, 2, (prod(roomy) * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    memory = torch.tensor([0xF7, 0xFF], dtype=torch.uint8)[drawn].view(dtype).view(roomy)
    view = memory.permute([order.index(axis) for axis in range(4)])
    return view[tuple(slice(size) for size in sizes)]
