"""What a copy refuses, and that a refused copy has written nothing."""

import pytest
import torch

from kv_kernels.gather import gather
from kv_kernels.layout import select
from kv_kernels.scatter import scatter

B, T, H, D = 4, 3, 2, 5


def planes(num_planes=2):
    return [torch.zeros(B, T, H, D) for _ in range(num_planes)]


def refusals():
    """(name, dense, planes, block ids, first token, first head, words of the error)."""
    dense, head_major = torch.ones(2, 4, 2, D), torch.zeros(B, H, T, D).transpose(1, 2)
    yield "no planes", dense, [], [0, 1], 0, 0, "no planes: got=0, least=1"
    yield "three axes", dense, [torch.zeros(T, H, D)] * 2, [0, 1], 0, 0, "not \\[B, T, H, D\\]"
    yield (
        "other strides",
        dense,
        [torch.zeros(B, T, H, D), head_major],
        [0, 1],
        0,
        0,
        "differ",
    )
    yield "other dtype", dense, [torch.zeros(B, T, H, D), torch.zeros(B, T, H, D).half()], [0, 1], 0, 0, "differ"
    yield "other head size", torch.ones(2, 4, 2, 4), planes(), [0, 1], 0, 0, "expected=\\[2, T', H', 5\\]"
    yield "other plane count", torch.ones(3, 4, 2, D), planes(), [0, 1], 0, 0, "got=\\(3, 4, 2, 5\\)"
    yield "dense dtype", dense.half(), planes(), [0, 1], 0, 0, "dense=torch.float16 on cpu, planes=torch.float32 on cpu"
    yield "too many tokens", dense, planes(), [0, 1], 3, 0, "tokens out of bounds: wanted=\\[3, 7\\), held=\\[0, 6\\)"
    yield "negative token", dense, planes(), [0, 1], -1, 0, "tokens out of bounds"
    yield "too many heads", dense, planes(), [0, 1], 0, 1, "heads out of bounds: wanted=\\[1, 3\\), held=\\[0, 2\\)"
    yield "block too high", dense, planes(), [0, B], 0, 0, "block id out of bounds: got=0..4, held=\\[0, 4\\)"
    yield "block below zero", dense, planes(), [0, -1], 0, 0, "block id out of bounds: got=-1..0"


@pytest.mark.parametrize("case", list(refusals()), ids=lambda case: case[0])
def test_a_misfit_is_refused_and_nothing_is_written(case):
    _, dense, cached, ids, first_token, first_head, words = case
    with pytest.raises(ValueError, match=words):
        scatter(cached, dense, ids, first_token=first_token, first_head=first_head)
    assert not any(plane.any() for plane in cached)
    with pytest.raises(ValueError, match=words):
        gather(dense, cached, ids, first_token=first_token, first_head=first_head)
    assert (dense == 1).all()


def test_a_block_is_not_written_twice():
    cached = planes(1)
    with pytest.raises(ValueError, match="blocks=2, distinct=1"):
        scatter(cached, torch.ones(1, 4, 2, D), [1, 1], first_token=0, first_head=0)
    assert not cached[0].any()


def test_a_block_may_be_read_twice():
    dense = torch.ones(1, 6, 2, D)
    gather(dense, planes(1), [1, 1], first_token=0, first_head=0)
    assert not dense.any()


def test_only_the_blocks_touched_are_selected():
    selection = select(torch.ones(1, 2, 2, D), planes(1), [99, 1, 2, 99], first_token=4, first_head=0)
    assert (selection.block_ids, selection.first_token) == ((1,), 1)


@pytest.mark.parametrize("shape", [(1, 0, 2, D), (1, 2, 0, D)])
def test_an_empty_copy_is_legal(shape):
    assert gather(torch.ones(shape), planes(1), [0], first_token=0, first_head=0) == ("reference", 4)
    assert scatter(planes(1), torch.ones(shape), [0], first_token=0, first_head=0) == ("reference", 4)


def test_triton_on_a_cpu_tensor_is_refused_rather_than_replaced():
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1: device=cpu"):
        gather(torch.ones(1, 2, 2, D), planes(1), [0], first_token=0, first_head=0, backend="triton")
