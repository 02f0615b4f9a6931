"""The Triton kernels, under the interpreter, against the model; each test proves which way its copy went."""

from random import Random

import pytest
import torch

from kv_testing.copies import TOKEN_MAJOR, WAYS, bits, draw_copy, gathered, scattered


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_the_gather_kernel_gives_what_the_model_gives(interpreted, way, seed):
    width, head_size, memory, dense_memory, word_bytes = way
    copy = draw_copy(Random(seed), width, (memory, dense_memory), head_size)
    route = interpreted.gather.gather(copy.dense, copy.planes, copy.block_ids, **copy.window, backend="triton")
    assert route == ("triton", word_bytes)
    assert bits(copy.dense).tolist() == gathered(copy)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_the_scatter_kernel_gives_what_the_model_gives_and_touches_nothing_else(interpreted, way, seed):
    width, head_size, memory, dense_memory, word_bytes = way
    copy = draw_copy(Random(seed), width, (memory, dense_memory), head_size)
    expected = scattered(copy)
    route = interpreted.scatter.scatter(copy.planes, copy.dense, copy.block_ids, **copy.window, backend="triton")
    assert route == ("triton", word_bytes)
    assert all(torch.equal(bits(plane), new) for plane, new in zip(copy.planes, expected, strict=True))


def test_a_misaligned_address_narrows_the_words(interpreted):
    flat = torch.arange(65, dtype=torch.uint8)
    plane, dense = flat[1:].view(2, 1, 1, 32), torch.zeros(1, 2, 1, 32, dtype=torch.uint8)
    route = interpreted.gather.gather(dense, [plane], [1, 0], first_token=0, first_head=0, backend="triton")
    assert route == ("triton", 1)
    assert dense.flatten().tolist() == [*range(33, 65), *range(1, 33)]


@pytest.mark.parametrize("num_tokens", [3, 700])
def test_rows_longer_than_a_step_and_more_rows_than_a_program(interpreted, num_tokens):
    """1,100 words need two steps of a row; 700 tokens of 2 heads and 3 words need several programs."""
    head_size = 2200 if num_tokens == 3 else 6
    plane = torch.randint(-(2**31), 2**31, (num_tokens, 1, 2, head_size), dtype=torch.int32)
    ids = torch.randperm(num_tokens).tolist()
    dense = torch.zeros(1, num_tokens, 2, head_size, dtype=torch.int32)
    back = torch.zeros_like(plane)
    interpreted.gather.gather(dense, [plane], ids, first_token=0, first_head=0, backend="triton")
    assert torch.equal(dense[0], plane[ids, 0])
    interpreted.scatter.scatter([back], dense, ids, first_token=0, first_head=0, backend="triton")
    assert torch.equal(back, plane)


def test_opaque_tiles_are_blocks_of_one_token(interpreted):
    plane, dense = torch.randn(5, 1, 2, 24), torch.zeros(1, 3, 2, 24)
    route = interpreted.gather.gather(dense, [plane], [4, 0, 2], first_token=0, first_head=0, backend="triton")
    assert route == ("triton", 16)
    assert torch.equal(dense[0], plane[[4, 0, 2], 0])


@pytest.mark.parametrize("shape", [(1, 0, 1, 4), (1, 1, 0, 4)])
def test_an_empty_copy_launches_nothing(interpreted, shape):
    plane, dense = torch.zeros(1, 1, 1, 4), torch.zeros(shape)
    window = {"first_token": 0, "first_head": 0, "backend": "triton"}
    assert interpreted.gather.gather(dense, [plane], [0], **window) == ("triton", 4)
    assert interpreted.scatter.scatter([plane], dense, [0], **window) == ("triton", 4)


def test_the_model_notices_one_wrong_element():
    """Negative control of the oracle used above."""
    copy = draw_copy(Random(1), 4, (TOKEN_MAJOR, TOKEN_MAJOR), 3)
    expected = gathered(copy)
    bits(copy.dense).copy_(torch.tensor(expected))
    assert bits(copy.dense).tolist() == expected
    bits(copy.dense)[-1, -1, -1, -1] ^= 1
    assert bits(copy.dense).tolist() != expected
