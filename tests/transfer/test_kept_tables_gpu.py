"""Parts of a request's blocks on a GPU: bits, sums, order in time, what is compiled and what is uploaded."""

from random import Random

import pytest
import torch
import triton

from kv_kernels import reference
from kv_kernels.block_table import At, BlockTable, gather_part, scatter_part
from kv_kernels.weighted_sum import weighted_sum
from kv_testing.copies import WAYS, bits, draw_copy
from kv_transfer.checksum import Summer, pending

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SLEEP_CYCLES = 200_000_000  # about 0.1 s at 2 GHz
WORD = 1 << 64


def told(copied):
    """The checksum, once the stream has come so far."""
    assert copied.sums is not None
    return pending([copied.sums])


def on_cpu(copy, at, table):
    """The same blocks in memory of the host."""
    return BlockTable([plane.cpu() for plane in table.planes], table.block_ids), copy.dense.cpu(), at


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("at_byte", [0, 16, 24])
def test_bits_and_sums_are_those_of_the_reference(way, seed, at_byte):
    width, head_size, memory, dense_memory, _ = way
    copy = draw_copy(Random(seed), width, (memory, dense_memory), head_size, "cuda")
    table, at = BlockTable(copy.planes, copy.block_ids), At(0, copy.first_token, copy.first_head)
    is_summed = copy.dense.stride(3) == 1
    there, expected, _ = on_cpu(copy, at, table)
    theirs = gather_part(expected, there, at, summed_at=at_byte if is_summed else None)
    source = copy.dense.clone()
    ours = gather_part(copy.dense, table, at, summed_at=at_byte)
    assert (ours.route.backend, theirs.route.backend) == ("triton", "reference")
    assert torch.equal(bits(copy.dense).cpu(), bits(expected))
    copy.dense.copy_(source)
    there, dense, _ = on_cpu(copy, at, table)
    scattered = scatter_part(there, dense, at)
    assert scattered.route.backend == "reference"
    written = scatter_part(table, copy.dense, at, summed_at=at_byte)
    assert all(torch.equal(bits(p).cpu(), bits(q)) for p, q in zip(table.planes, there.planes, strict=True))
    if is_summed:
        assert int(ours.sums.sum()) == int(theirs.sums)
        assert int(written.sums.sum()) == int(reference.sum_of(dense, at_byte))


@pytest.mark.parametrize("order", ["BTHD", "BHTD"])
def test_a_chunk_has_the_checksum_of_the_cpu(order):
    """64 MiB of a request, in both orders of the wire; and the pass of its own says the same."""
    shape = (128, 16, 8, 128)
    planes = [torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda") for _ in range(16)]
    if order == "BHTD":
        planes = [plane.transpose(1, 2).contiguous().transpose(1, 2) for plane in planes]
    table = BlockTable(planes, torch.randperm(128).tolist())
    staged = torch.empty(16 * 2048 * 8 * 128, dtype=torch.int16, device="cuda")
    dense = staged.view(16, 2048, 8, 128) if order == "BTHD" else staged.view(16, 8, 2048, 128).transpose(1, 2)
    copied = gather_part(dense, table, At(), summed_at=0)
    found = told(copied)
    again = told(scatter_part(table, dense, At(), summed_at=0))
    torch.cuda.synchronize()
    assert copied.route.word_bytes == 16
    assert found.known() == Summer().checksum(staged.cpu().view(torch.uint8)) == again.known()
    assert found.known() == int(weighted_sum(staged.view(torch.int64)))


def test_parts_run_in_the_order_of_their_stream_and_are_not_waited_for():
    """The planes are filled behind a sleep: a gather or an upload that overtook would see zeroes, or another table."""
    plane = torch.zeros(64, 16, 8, 128, device="cuda")
    dense = torch.zeros(4, 1, 16, 8, 128, device="cuda")
    numbers = torch.arange(64.0, device="cuda").view(-1, 1, 1, 1).expand_as(plane)
    stream = torch.cuda.Stream()
    # The first round compiles, and makes memory of the stream and of the host: that may wait.
    for cycles in (0, SLEEP_CYCLES):
        plane.zero_()
        dense.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            plane.copy_(numbers)
            table = BlockTable([plane], [7, 9, 33, 60])
            parts = [gather_part(part, table, At(0, 16 * ordinal), summed_at=0) for ordinal, part in enumerate(dense)]
            found = [told(part) for part in parts]
            # What is dropped here is still used by what is queued.
            del table, parts
            for _ in range(64):
                torch.full((4096,), -1, dtype=torch.int64, device="cuda")
            is_waited_for = stream.query()
        stream.synchronize()
        for part, block_id, checksum in zip(dense, (7, 9, 33, 60), found, strict=True):
            assert (part == block_id).all()
            assert checksum.known() == Summer().checksum(part.cpu().contiguous().view(-1).view(torch.uint8))
    assert not is_waited_for


def test_tables_that_are_dropped_while_their_copies_wait_are_not_overwritten():
    """300 requests are queued while the stream is busy, each with a table that nobody keeps."""
    plane = torch.arange(300, dtype=torch.int64, device="cuda").view(300, 1, 1, 1)
    dense = torch.zeros(300, 1, 1, 1, 1, dtype=torch.int64, device="cuda")
    ids = torch.randperm(300).tolist()
    torch.cuda._sleep(SLEEP_CYCLES)
    found = [
        told(gather_part(out, BlockTable([plane], [block_id]), At(), summed_at=0))
        for out, block_id in zip(dense, ids, strict=True)
    ]
    torch.cuda.synchronize()
    assert dense.flatten().tolist() == ids
    weight = int(reference.weights(1))
    assert [one.known() % WORD for one in found] == [block_id * weight % WORD for block_id in ids]


def test_a_request_compiles_nothing_that_an_earlier_one_has_compiled(monkeypatch):
    """One kernel for each direction and order of the wire, with sums and without, whatever part of whatever length."""
    plane, compiled = torch.zeros(64, 16, 8, 128, dtype=torch.bfloat16, device="cuda"), []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **event: compiled.append(event))
    for num_tokens, first_token, num_planes in [(16, 0, 4), (1, 1, 1), (333, 16, 64), (47, 0, 1), (160, 5, 2)]:
        table = BlockTable([plane] * num_planes, range(64))
        for wire in ((num_planes, num_tokens, 8, 128), (num_planes, 8, num_tokens, 128)):
            dense = torch.zeros(wire, dtype=torch.bfloat16, device="cuda")
            dense = dense if wire[2] == 8 else dense.transpose(1, 2)
            for summed_at in (None, 0, 1 << 24):
                gather_part(dense, table, At(0, first_token), summed_at=summed_at)
                scatter_part(table, dense, At(0, first_token), summed_at=summed_at)
    assert len(compiled) <= 8


def test_a_changed_bit_changes_the_sum():
    plane = torch.zeros(8, 16, 8, 128, dtype=torch.int16, device="cuda")
    table, dense = BlockTable([plane], range(8)), torch.zeros(1, 128, 8, 128, dtype=torch.int16, device="cuda")
    assert int(gather_part(dense, table, At(), summed_at=0).sums.sum()) == 0
    plane[5, 3, 2, 1] = 1
    assert int(gather_part(dense, table, At(), summed_at=0).sums.sum()) != 0
