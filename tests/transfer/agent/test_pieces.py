"""Cutting a movement: every byte in exactly one piece, every piece bounded and of one kind on each side."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kv_core.errors import CallerError
from kv_transfer.agent.base import Runs
from kv_transfer.agent.cards import RemoteSlice
from kv_transfer.agent.pieces import check_movement, cut, regions_of
from kv_transfer.regions import Region, RegionSlice, host_region

HOST = host_region(4096)
DEVICE = Region(HOST.address, 4096, "device", 3, HOST.memory)


@st.composite
def pairs(draw):
    region = draw(st.sampled_from([HOST, DEVICE]))
    offset = draw(st.integers(0, 4000))
    num_bytes = draw(st.integers(1, 4096 - offset))
    kind = draw(st.sampled_from(["host", "device"]))
    theirs = RemoteSlice(address=draw(st.integers(0, 1 << 40)), num_bytes=num_bytes, kind=kind, device_id=1)
    return RegionSlice(region, offset, num_bytes), theirs


def bytes_of(pair):
    ours, theirs = pair
    where = (ours.region.kind, ours.region.device_id, theirs.kind, theirs.device_id)
    return [(*where, ours.address + i, theirs.address + i) for i in range(ours.num_bytes)]


@given(st.lists(pairs(), max_size=5), st.integers(1, 5000))
def test_every_byte_lies_in_exactly_one_bounded_piece(movement, max_post_bytes):
    pieces = cut("read", movement, max_post_bytes)
    moved = [
        (
            piece.our_kind,
            move.our_device,
            piece.their_kind,
            move.their_device,
            move.our_address + i,
            move.their_address + i,
        )
        for piece in pieces
        for move in piece.moves
        for i in range(move.num_bytes)
    ]
    assert moved == [byte for pair in movement for byte in bytes_of(pair)]
    assert all(0 < piece.num_bytes <= max_post_bytes for piece in pieces)
    assert all(piece.direction == "read" for piece in pieces)


def test_small_neighbours_share_a_post() -> None:
    small = [(HOST.slice(8 * i, 8), HOST.slice(8 * i, 8).remote) for i in range(10)]
    assert [len(piece.table) for piece in cut("write", small, 32)] == [4, 4, 2]


@given(st.lists(pairs(), min_size=1, max_size=5), st.integers(1, 5000))
def test_a_table_of_runs_moves_as_its_pairs_do(movement, max_post_bytes):
    ours, theirs = movement[0]
    alike = [
        (RegionSlice(ours.region, our.offset, our.num_bytes), replace(their, kind=theirs.kind, device_id=1))
        for our, their in movement
    ]
    columns = zip(*((our.address, their.address, our.num_bytes) for our, their in alike), strict=True)
    addresses, remote, lengths = (np.array(column, dtype=np.uint64) for column in columns)
    runs = Runs(ours.region, theirs.kind, 1, addresses, remote, lengths)
    one, other = (cut("read", each, max_post_bytes) for each in (alike, [runs]))
    assert [list(piece.moves) for piece in one] == [list(piece.moves) for piece in other]
    assert list(regions_of([runs])) == [ours.region]


def test_runs_are_checked() -> None:
    def runs(address, length, num=1):
        table = [np.array([value] * num, dtype=np.uint64) for value in (address, 0, length)]
        return Runs(HOST, "host", 0, *table)

    for first, length in ((HOST.address - 1, 8), (HOST.address + 4089, 8), (HOST.address, 0)):
        with pytest.raises(CallerError, match=f"leaves its region: runs=.{first}"):
            runs(first, length)
    with pytest.raises(CallerError, match="ours=0, theirs=0, lengths=0"):
        runs(HOST.address, 8, num=0)
    with pytest.raises(CallerError, match="not registered"):
        check_movement([runs(HOST.address, 8)], {DEVICE})


def test_pairs_are_checked() -> None:
    with pytest.raises(CallerError, match="at least one pair"):
        check_movement([], {HOST})
    with pytest.raises(CallerError, match="ours=8, theirs=9"):
        check_movement([(HOST.slice(0, 8), HOST.slice(0, 9).remote)], {HOST})
    with pytest.raises(CallerError, match="not registered"):
        check_movement([(HOST.slice(0, 8), HOST.slice(0, 8).remote)], {DEVICE})
