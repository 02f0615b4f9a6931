"""The Triton kernels compiled for a GPU: bits, reach (more blocks and bytes than 32 bits count), order in time."""

from random import Random
from typing import Any

import pytest
import torch
import triton

from kv_kernels import reference
from kv_kernels.block_copy import copy_blocks
from kv_kernels.gather import gather
from kv_kernels.layout import Corner, MappedPlanes
from kv_kernels.peer import peer_copy
from kv_kernels.scatter import scatter
from kv_testing.copies import (
    HEAD_MAJOR,
    TOKEN_MAJOR,
    WAYS,
    Window,
    bits,
    block_copied,
    draw_block_copy,
    draw_copy,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SLEEP_CYCLES = 200_000_000  # about 0.1 s at 2 GHz
WINDOW: Window = {"first_token": 0, "first_head": 0}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
def test_bits_are_those_of_the_reference(way, seed):
    width, head_size, memory, dense_memory, word_bytes = way
    copy = draw_copy(Random(seed), width, (memory, dense_memory), head_size, "cuda")
    expected = torch.empty_like(copy.dense)
    reference.gather(expected, copy.planes, copy.block_ids, **copy.window)
    source = copy.dense.clone()
    assert gather(copy.dense, copy.planes, copy.block_ids, **copy.window) == ("triton", word_bytes)
    assert torch.equal(bits(copy.dense), bits(expected))
    by_reference = [plane.clone() for plane in copy.planes]
    reference.scatter(by_reference, source, copy.block_ids, **copy.window)
    copy.dense.copy_(source)
    assert scatter(copy.planes, copy.dense, copy.block_ids, **copy.window) == ("triton", word_bytes)
    assert all(torch.equal(bits(p), bits(q)) for p, q in zip(copy.planes, by_reference, strict=True))


@pytest.mark.parametrize("memories", [(TOKEN_MAJOR, TOKEN_MAJOR), (HEAD_MAJOR, HEAD_MAJOR), (TOKEN_MAJOR, HEAD_MAJOR)])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_mapped", [False, True])
def test_blocks_are_copied_as_by_the_model(memories, seed, is_mapped):
    copy = draw_block_copy(Random(seed), (1, 2, 4, 8)[seed % 4], memories, (1, 3, 8, 16)[seed % 4], "cuda")
    expected = block_copied(copy)
    window: Any = {"num_tokens": copy.num_tokens, "num_heads": copy.num_heads}
    window |= {"at": Corner(*copy.at), "source_at": Corner(*copy.source_at)}
    if is_mapped:
        mapped = MappedPlanes.of(copy.source)
        route = peer_copy(copy.planes, copy.block_ids, mapped, copy.source_ids, **window)
    else:
        route = copy_blocks(copy.planes, copy.block_ids, copy.source, copy.source_ids, **window)
    assert route.backend == "triton"
    assert all(torch.equal(bits(plane), new) for plane, new in zip(copy.planes, expected, strict=True))


def test_host_memory_is_filled_and_read_by_the_kernel():
    planes = [torch.randn(9, 4, 2, 8, device="cuda") for _ in range(3)]
    ids, host = [7, 2, 5], torch.zeros(3, 12, 2, 8, pin_memory=True)
    assert gather(host, planes, ids, **WINDOW) == ("triton", 16)
    torch.cuda.synchronize()
    expected = torch.stack([plane[ids].flatten(0, 1) for plane in planes])
    assert torch.equal(host, expected.cpu())
    others = [torch.zeros_like(plane) for plane in planes]
    assert scatter(others, host, ids, **WINDOW) == ("triton", 16)
    assert all(torch.equal(a[ids], b[ids]) for a, b in zip(others, planes, strict=True))


def test_more_blocks_than_16_bits_count():
    plane = torch.arange(70_000 * 4, dtype=torch.int32, device="cuda").view(70_000, 2, 1, 2)
    ids = torch.randperm(70_000).tolist()
    dense = torch.empty(1, 140_000, 1, 2, dtype=torch.int32, device="cuda")
    assert gather(dense, [plane], ids, **WINDOW).backend == "triton"
    assert torch.equal(dense.view(70_000, 2, 1, 2), plane[torch.tensor(ids, device="cuda")])
    back = torch.zeros_like(plane)
    assert scatter([back], dense, ids, **WINDOW).backend == "triton"
    assert torch.equal(back, plane)


@pytest.mark.parametrize(("head_size", "word_bytes"), [(1023, 1), (1024, 16)])
def test_offsets_beyond_32_bits(head_size, word_bytes):
    """A plane of 5.4 GB: its last blocks lie above 2^31 elements, and above 2^32 bytes."""
    num_blocks = 330_000
    plane = torch.zeros(num_blocks, 2, 8, head_size, dtype=torch.uint8, device="cuda")
    ids = [0, num_blocks // 2, num_blocks - 1]
    dense = torch.randint(0, 255, (1, 6, 8, head_size), dtype=torch.uint8, device="cuda")
    assert scatter([plane], dense, ids, **WINDOW) == ("triton", word_bytes)
    assert torch.equal(plane[ids].view_as(dense), dense)
    back = torch.zeros_like(dense)
    assert gather(back, [plane], ids, **WINDOW) == ("triton", word_bytes)
    assert torch.equal(back, dense)
    plane[ids] = 0
    assert not plane.any()


def test_a_copy_is_queued_and_not_waited_for():
    plane, dense = torch.ones(64, 16, 8, 128, device="cuda"), torch.zeros(1, 16, 8, 128, device="cuda")
    gather(dense, [plane], [3], **WINDOW)  # compiles
    scatter([plane], dense, [3], **WINDOW)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    gather(dense, [plane], [5], **WINDOW)
    scatter([plane], dense, [7], **WINDOW)
    assert not torch.cuda.current_stream().query()


def test_a_request_compiles_nothing_that_an_earlier_one_has_compiled(monkeypatch):
    """Lengths and offsets differ from call to call; a compilation takes a hundred times as long as a copy.

    Each direction and each order of the wire has one kernel of its own, whatever the request.
    """
    plane, compiled = torch.zeros(64, 16, 8, 128, dtype=torch.bfloat16, device="cuda"), []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **event: compiled.append(event))
    for num_tokens, first_token, num_planes in [(16, 0, 4), (1, 1, 1), (333, 16, 64), (47, 0, 1), (160, 5, 2)]:
        for wire in ((num_planes, num_tokens, 8, 128), (num_planes, 8, num_tokens, 128)):
            dense = torch.zeros(wire, dtype=torch.bfloat16, device="cuda")
            dense = dense if wire[2] == 8 else dense.transpose(1, 2)
            gather(dense, [plane] * num_planes, range(64), first_token=first_token, first_head=0)
            scatter([plane] * num_planes, dense, range(64), first_token=first_token, first_head=0)
    assert len(compiled) <= 4  # none, where another test has been here before


def test_tables_of_queued_copies_do_not_overwrite_each_other():
    """300 copies with different ids are queued while the stream is busy; each must find its own table when it runs."""
    plane = torch.arange(300, dtype=torch.int64, device="cuda").view(300, 1, 1, 1)
    dense = torch.zeros(300, 1, 1, 1, 1, dtype=torch.int64, device="cuda")
    ids = torch.randperm(300).tolist()
    torch.cuda._sleep(SLEEP_CYCLES)
    for out, block_id in zip(dense, ids, strict=True):
        gather(out, [plane], [block_id], **WINDOW)
    assert dense.flatten().tolist() == ids


def test_a_copy_runs_in_the_order_of_its_stream():
    plane, dense = torch.zeros(8, 1, 1, 4, device="cuda"), torch.zeros(1, 8, 1, 4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES)
        plane.fill_(7)
        gather(dense, [plane], list(range(8)), **WINDOW)
        assert (dense == 7).all()


@pytest.mark.multi_gpu
def test_the_planes_device_need_not_be_the_current_one():
    plane = torch.arange(8, dtype=torch.int64, device="cuda:1").view(8, 1, 1, 1)
    dense = torch.zeros(1, 8, 1, 1, dtype=torch.int64, device="cuda:1")
    assert torch.cuda.current_device() == 0
    gather(dense, [plane], list(range(7, -1, -1)), **WINDOW)
    assert dense.flatten().tolist() == list(range(7, -1, -1))
