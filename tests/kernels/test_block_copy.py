"""Copies between paged caches of different shape: reference, kernel and mapped planes, against the model."""

from random import Random

import pytest
import torch

from kv_kernels.block_copy import copy_blocks
from kv_kernels.layout import Corner, MappedPlanes
from kv_kernels.peer import peer_copy
from kv_kernels.tuning import Tuning
from kv_testing.copies import HEAD_MAJOR, TOKEN_MAJOR, TRANSPOSED, bits, block_copied, draw_block_copy

MEMORIES = [
    (TOKEN_MAJOR, TOKEN_MAJOR),
    (HEAD_MAJOR, HEAD_MAJOR),
    (TOKEN_MAJOR, HEAD_MAJOR),
    (HEAD_MAJOR, TOKEN_MAJOR),
    (TRANSPOSED, HEAD_MAJOR),
]


def arguments(copy, source):
    window = {"num_tokens": copy.num_tokens, "num_heads": copy.num_heads}
    window |= {"at": Corner(*copy.at), "source_at": Corner(*copy.source_at)}
    return (copy.planes, copy.block_ids, source, copy.source_ids), window


@pytest.mark.parametrize("memories", MEMORIES)
@pytest.mark.parametrize("seed", range(8))
def test_the_reference_gives_what_the_model_gives(memories, seed):
    copy = draw_block_copy(Random(seed), (1, 2, 4, 8)[seed % 4], memories, head_size=(1, 3, 8)[seed % 3])
    expected = block_copied(copy)
    positional, window = arguments(copy, copy.source)
    assert copy_blocks(*positional, **window).backend == "reference"
    assert all(torch.equal(bits(plane), new) for plane, new in zip(copy.planes, expected, strict=True))


@pytest.mark.parametrize("memories", MEMORIES)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_mapped", [False, True])
def test_the_kernel_gives_what_the_model_gives(interpreted, memories, seed, is_mapped):
    """Two programs only, so that each moves many pieces."""
    copy = draw_block_copy(Random(seed), (1, 2, 4, 8)[seed % 4], memories, head_size=(1, 3, 8)[seed % 3])
    expected = block_copied(copy)
    source = MappedPlanes.of(copy.source) if is_mapped else copy.source
    positional, window = arguments(copy, source)
    window["tuning"] = Tuning(tile_words=16, num_warps=4, num_programs=2)
    if is_mapped:
        route = interpreted.peer.peer_copy(*positional, **window)
    else:
        route = interpreted.block_copy.copy_blocks(*positional, **window, backend="triton")
    assert route.backend == "triton"
    assert all(torch.equal(bits(plane), new) for plane, new in zip(copy.planes, expected, strict=True))


def test_mapped_planes_need_a_kernel():
    planes = [torch.zeros(2, 2, 1, 4)]
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1: device=cpu"):
        peer_copy(planes, [0], MappedPlanes.of(planes), [1], num_tokens=2, num_heads=1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"source": [torch.zeros(4, 2, 1, 8)]}, "the planes do not fit each other"),
        ({"source": [torch.zeros(4, 2, 1, 4)] * 2}, "the planes do not fit each other"),
        ({"source": [torch.zeros(4, 2, 1, 4).half()]}, "the planes do not fit each other"),
        ({"block_ids": [1, 1]}, "written twice"),
        ({"source_ids": [0, 4]}, "block id out of bounds"),
        ({"num_tokens": 5}, "tokens out of bounds"),
        ({"num_tokens": -1}, "tokens out of bounds"),
        ({"num_heads": 2}, "heads out of bounds"),
        ({"source_at": Corner(0, 1)}, "heads out of bounds"),
    ],
)
def test_a_misfit_is_refused_and_nothing_is_written(changed, words):
    planes = [torch.zeros(4, 2, 1, 4)]
    given = {"source": [torch.ones(4, 2, 1, 4)], "block_ids": [0, 1], "source_ids": [2, 3]}
    given |= {"num_tokens": 4, "num_heads": 1, **changed}
    with pytest.raises(ValueError, match=words):
        copy_blocks(planes, **given)
    assert not planes[0].any()


def test_an_empty_copy_is_legal():
    planes = [torch.zeros(2, 2, 1, 4)]
    assert copy_blocks(planes, [], planes, [], num_tokens=0, num_heads=1) == ("reference", 4)
