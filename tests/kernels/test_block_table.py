"""Parts of a request's blocks: the bits of the model, the sum of the words that were copied, one upload."""

import importlib
import inspect
from random import Random

import pytest
import torch

from kv_kernels import block_table, reference
from kv_kernels.block_table import At, gather_part
from kv_testing.copies import HEAD_MAJOR, TOKEN_MAJOR, WAYS, bits, draw_copy, gathered, scattered

WORD = 1 << 64
OUTER_HOLE = 3
"""Blocks before and behind those of a drawn copy, which are a hole."""


def by_hand(flat, at_byte):
    """The documented sum of these bytes, the first of which is byte `at_byte`; in Python's own integers."""
    total = 0
    for number, byte in enumerate(flat.view(torch.uint8).flatten().tolist(), start=at_byte):
        mixed = number // 8 + 1
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            mixed = (mixed ^ mixed >> 33) * factor % WORD
        total += (byte << number % 8 * 8) * (mixed ^ mixed >> 33 | 1)
    return total % WORD


def in_memory(dense):
    """The elements of a dense view as they follow each other in memory."""
    order = sorted(range(4), key=dense.stride().__getitem__, reverse=True)
    return bits(dense).permute(order).contiguous()


def placed(dense, at_byte):
    """The same view over memory of which it begins at byte `at_byte`, which is at a multiple of 16."""
    flat = torch.zeros(at_byte + dense.nbytes + 32, dtype=torch.uint8, device=dense.device)
    flat = flat[-flat.data_ptr() % 16 :][: at_byte + dense.nbytes]
    view = flat[at_byte:].view(dense.dtype).as_strided(dense.shape, dense.stride())
    return view.copy_(dense)


def table_of(module, copy):
    """The drawn blocks with a hole before them and behind them, which stand among planes that are not meant."""
    hole = [-1] * OUTER_HOLE
    planes = [copy.planes[0], *copy.planes, copy.planes[0]]
    at = module.At(1, OUTER_HOLE * copy.planes[0].shape[1] + copy.first_token, copy.first_head)
    return module.BlockTable(planes, [*hole, *copy.block_ids, *hole]), at


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_a_gathered_part_is_that_of_the_model_with_the_sum_of_its_words(interpreted, way, seed):
    width, head_size, memory, dense_memory, word_bytes = way
    dice = Random(seed)
    copy = draw_copy(dice, width, (memory, dense_memory), head_size)
    at_byte = dice.choice([0, 16, 8 * width, width])
    out = placed(copy.dense, at_byte)
    blocks, at = table_of(interpreted.block_table, copy)
    copied = interpreted.block_table.gather_part(out, blocks, at, summed_at=at_byte, backend="triton")
    assert copied.route.backend == "triton"
    assert copied.route.word_bytes == word_bytes or at_byte % word_bytes
    assert bits(out).tolist() == gathered(copy)
    if out.stride(3) == 1:
        assert int(copied.sums.sum()) % WORD == by_hand(in_memory(out), at_byte)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_a_scattered_part_is_that_of_the_model_with_the_sum_of_its_words(interpreted, way, seed):
    width, head_size, memory, dense_memory, _ = way
    dice = Random(seed)
    copy = draw_copy(dice, width, (memory, dense_memory), head_size)
    at_byte = dice.choice([0, 16, 8 * width, width])
    expected, src = scattered(copy), placed(copy.dense, at_byte)
    blocks, at = table_of(interpreted.block_table, copy)
    copied = interpreted.block_table.scatter_part(blocks, src, at, summed_at=at_byte, backend="triton")
    assert copied.route.backend == "triton"
    assert all(torch.equal(bits(plane), new) for plane, new in zip(copy.planes, expected, strict=True))
    if src.stride(3) == 1:
        assert int(copied.sums.sum()) % WORD == by_hand(in_memory(src), at_byte)


@pytest.mark.parametrize("way", [way for way in WAYS if way[3] != "BHDT"])
def test_the_twin_tells_the_same_sum(way):
    width, head_size, memory, dense_memory, _ = way
    copy = draw_copy(Random(7), width, (memory, dense_memory), head_size)
    out = placed(copy.dense, 3 * width)
    blocks, at = table_of(block_table, copy)
    copied = gather_part(out, blocks, at, summed_at=3 * width)
    assert copied.route == ("reference", width)
    assert bits(out).tolist() == gathered(copy)
    assert int(copied.sums.sum()) % WORD == by_hand(in_memory(out), 3 * width)


def test_the_sums_of_parts_are_the_sum_of_the_whole(interpreted):
    """Few programs with many tiles each; the second part begins within a word."""
    planes = [torch.randint(-(2**15), 2**15, (40, 4, 3, 6), dtype=torch.int16) for _ in range(2)]
    ids = torch.randperm(40).tolist()
    module, few = interpreted.block_table, interpreted.block_table.SUMMING
    blocks = module.BlockTable(planes, ids)
    flat = torch.zeros(2 * 160 * 3 * 6, dtype=torch.int16)
    dense, total = flat.view(2, 160, 3, 6), 0
    tuning = type(few)(tile_words=64, num_warps=1, num_programs=3)
    for first, stop in ((0, 33), (33, 160)):
        part = dense[:, first:stop]
        at_byte = (part.data_ptr() - flat.data_ptr()) or 0
        copied = module.gather_part(
            part, blocks, module.At(0, first, 0), summed_at=at_byte, backend="triton", tuning=tuning
        )
        assert copied.sums.shape == (3,)
        total += int(copied.sums.sum())
    assert torch.equal(dense, torch.stack([plane[ids].flatten(0, 1) for plane in planes]))
    words = torch.zeros(-(-flat.numel() // 4) * 4, dtype=torch.int16)
    words[: flat.numel()] = flat
    assert total % WORD == int(reference.weighted_sum(words.view(torch.int64))) % WORD


def test_all_parts_use_one_upload(interpreted, monkeypatch):
    module, made = interpreted.block_table, []
    upload = module.upload

    def counted(*told):
        made.append(told)
        return upload(*told)

    monkeypatch.setattr(module, "upload", counted)
    blocks = module.BlockTable([torch.randn(6, 2, 1, 4) for _ in range(3)], [5, 0, 3])
    out = torch.zeros(1, 2, 1, 4)
    for plane in range(3):
        for first in (0, 2, 4):
            module.gather_part(out, blocks, module.At(plane, first, 0), backend="triton")
            assert torch.equal(out[0], blocks.planes[plane][blocks.block_ids[first // 2]])
    assert len(made) == 1


PLANES = [torch.zeros(4, 2, 2, 4) for _ in range(2)]


@pytest.mark.parametrize(
    ("ids", "at", "shape", "why"),
    [
        ([0, 1], At(1), (2, 1, 1, 4), "does not fit the planes"),
        ([0, 1], At(2), (1, 1, 1, 4), "planes out of bounds"),
        ([0, 1], At(-1), (1, 1, 1, 4), "planes out of bounds"),
        ([0, 1], At(0, 3), (1, 2, 1, 4), "tokens out of bounds"),
        ([0, 1], At(0, 0, 1), (1, 1, 2, 4), "heads out of bounds"),
        ([0, -1, 1], At(0, 1), (1, 2, 1, 4), "block id out of bounds: got=-1"),
        ([0, 4], At(0, 1), (1, 2, 1, 4), "block id out of bounds: got=0..4"),
        ([0, 0], At(), (1, 3, 1, 4), "written twice"),
    ],
)
def test_a_part_that_does_not_fit_is_refused_and_nothing_is_written(interpreted, ids, at, shape, why):
    blocks = interpreted.block_table.BlockTable(PLANES, ids)
    with pytest.raises(ValueError, match=why):
        interpreted.block_table.scatter_part(blocks, torch.ones(shape), at, backend="triton")
    assert not any(plane.any() for plane in PLANES)


def test_blocks_listed_twice_hinder_only_the_parts_that_have_both(interpreted):
    module = interpreted.block_table
    blocks = module.BlockTable([torch.zeros(4, 2, 1, 4)], [3, 1, 3])
    module.scatter_part(blocks, torch.ones(1, 4, 1, 4), At(0, 2), backend="triton")
    assert blocks.planes[0].sum() == 16


@pytest.mark.parametrize("num_words", [0, 1, 5, 300])
def test_the_twin_of_the_sum_is_the_documented_one(num_words):
    words = torch.randint(-(2**62), 2**62, (num_words,), dtype=torch.int64)
    assert int(reference.weighted_sum(words)) % WORD == by_hand(words, 0)


def test_control_a_changed_bit_changes_the_sum(interpreted):
    copy = draw_copy(Random(2), 2, (TOKEN_MAJOR, HEAD_MAJOR), 6)
    blocks, at = table_of(interpreted.block_table, copy)
    sums = []
    for _ in range(2):
        copied = interpreted.block_table.gather_part(copy.dense, blocks, at, summed_at=0, backend="triton")
        sums.append(int(copied.sums.sum()))
        ordinal, slot = divmod(copy.first_token, copy.planes[0].shape[1])
        bits(copy.planes[0])[copy.block_ids[ordinal], slot, copy.first_head, 0] ^= 1
    assert sums[0] != sums[1]


def test_what_a_kernel_is_compiled_for_does_not_depend_on_the_request(interpreted, monkeypatch):
    """Two orders of the wire, with sums and without: arguments that change from call to call are told as such."""
    paged_copy = importlib.import_module("kv_kernels.paged_copy")
    names = [*inspect.signature(paged_copy._copy_kernel.fn).parameters][2:]
    kinds, plane = set(), torch.zeros(64, 16, 8, 128, dtype=torch.bfloat16)

    def noted(launch, _sums):
        told = zip(names, launch.arguments, strict=False)
        fixed = [(name, value) for name, value in told if name not in paged_copy.PER_CALL]
        kinds.add((*fixed, *launch.constants.items(), launch.word_bytes))

    monkeypatch.setattr(paged_copy, "_run", noted)
    for num_tokens, first_token, num_planes in [(16, 0, 4), (1, 1, 1), (333, 16, 64), (47, 0, 1), (160, 5, 2)]:
        table, at = interpreted.block_table.BlockTable([plane] * num_planes, range(64)), At(0, first_token)
        for wire in ((num_planes, num_tokens, 8, 128), (num_planes, 8, num_tokens, 128)):
            dense = torch.zeros(wire, dtype=torch.bfloat16)
            dense = dense if wire[2] == 8 else dense.transpose(1, 2)
            for summed_at in (None, 0, 1 << 24):
                interpreted.block_table.gather_part(dense, table, at, summed_at=summed_at, backend="triton")
    assert len(kinds) == 4
