"""The bytes of the format, pinned; names and covers against naive models."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from kv_core.ids import BlockId
from kv_core.keys import BlockKey
from kv_core.spans import Span
from kv_testing.stores import config_of, cut, record_files
from kv_transfer.plan.cache_state import BlockLayout
from kv_transfer.pools import PagedCaches
from kv_transfer.prefix_store.boxes import Box, cover
from kv_transfer.prefix_store.header import Header, checksum_in
from kv_transfer.prefix_store.misses import Missed
from kv_transfer.prefix_store.names import Namespace, RecordName
from kv_transfer.prefix_store.store import PrefixStore

STATE = cut(dtype="uint8", head_size=1, num_layers=1, num_kv_heads=2, stages=(1,), fingerprint="abc")


@pytest.mark.parametrize(("order", "axes"), [("token_major", 0), ("head_major", 1)])
def test_a_file_byte_by_byte(tmp_path, order, axes):
    """Two tokens of one layer with two heads: bytes are [plane][token][head], whatever the blocks are."""
    state = cut(dtype="uint8", head_size=1, num_kv_heads=2, stages=(1,), fingerprint="abc", layout=BlockLayout(order))
    planes = tuple(torch.arange(64).view(2, 16, 2, 1).to(torch.uint8) + 100 * kind for kind in range(2))
    if axes:
        planes = tuple(plane.transpose(1, 2).contiguous().transpose(1, 2) for plane in planes)
    store = PrefixStore(config_of(tmp_path), state)
    outcome = store.write(store.chain([5, 6]), Span(0, 2), PagedCaches(0, planes, 0, 16), [[BlockId(1)]])
    (path,) = record_files(tmp_path / "store")
    content = path.read_bytes()
    assert (outcome.num_bytes, len(content)) == (264, 264)
    assert content[256:] == bytes([32, 33, 34, 35, 132, 133, 134, 135])
    assert content[:16] == b"KVPREFIX" + bytes([1, 0, 0, 0, 0, 1, 0, 0])
    assert content[80:112].hex() == path.parent.name
    assert content[112:140] == b"".join(number.to_bytes(4, "little") for number in (0, 1, 0, 2, 2, 2, 1))
    assert content[140:160] == b"uint8".ljust(20, b"\0")
    assert content[160:168] == (8).to_bytes(8, "little")
    assert content[176:252] == bytes(76)
    assert path.name == "l0-1.h0-2.t2.p35.x0"


def test_what_the_namespace_depends_on_does_not_change_unnoticed():
    assert Namespace.of(STATE, "kvferry block 1", 16).folder == "v1-480ba775a015ab97-4b3173b68fef8f4be53212a9acf057ae"


def test_ranks_and_blocks_have_no_part_in_the_namespace():
    ours = {Namespace.of(cut(tp, tokens_per_block=size), "r", 16) for tp in (1, 2, 4) for size in (16, 32, 64)}
    assert len(ours) == 1
    assert len({Namespace.of(cut(), rule, size) for rule in "ab" for size in (16, 32)}) == 4


@given(st.binary(max_size=400))
def test_any_bytes_are_a_header_or_a_miss(content):
    wanted = Header.of(Namespace(bytes(32), bytes(32)), BlockKey(bytes(32)), Box(Span(0, 1), Span(0, 1)), 3, STATE)
    with pytest.raises(Missed):
        checksum_in(content[:256], wanted)
    assert checksum_in(wanted.packed(), wanted) == 0


def spans(high=6):
    return st.tuples(st.integers(0, high), st.integers(1, 4)).map(lambda pair: Span(pair[0], pair[0] + pair[1]))


boxes = st.builds(Box, spans(), spans())


def cells(box):
    return {(layer, head) for layer in box.layers for head in box.heads}


@given(boxes, st.lists(boxes, max_size=6))
def test_a_cover_takes_each_part_once_from_a_box_that_has_it(wanted, held):
    found = cover((wanted,), held)
    assert (found is not None) == (cells(wanted) <= set().union(*map(cells, held)))
    if found is not None:
        taken = [cell for parts in found.values() for part in parts for cell in cells(part)]
        assert sorted(taken) == sorted(cells(wanted))
        assert all(cells(part) <= cells(box) for box, parts in found.items() for part in parts)
        assert set(found) <= set(held)


@given(st.builds(RecordName, boxes, st.integers(1, 99), st.integers(0, 100), st.integers(0, 2**33)))
def test_a_name_tells_what_was_put_in(name):
    assert RecordName.parse(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        *("", "l0-1.h0-1.t1.p35", "l0-1.h0-1.t1.p35.x0.part", " l0-1.h0-1.t1.p35.x0", "l0-1.h0-1.t1.p35.x0\n"),
        *("l1-1.h0-1.t1.p35.x0", "l0-1.h2-1.t1.p35.x0", "l0-1.h0-1.t0.p35.x0", "l00-1.h0-1.t1.p35.x0"),
        *(
            "l0-1.h0-1.t1.p-5.x0",
            "l0-1.h0-1.t\u0661.p35.x0",
            "../l0-1.h0-1.t1.p35.x0",
            "l0-9999999999999.h0-1.t1.p35.x0",
        ),
    ],
)
def test_other_names_are_no_records(text):
    assert RecordName.parse(text) is None
