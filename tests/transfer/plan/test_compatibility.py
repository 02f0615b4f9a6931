"""Every reason at once, with both values; and what is no reason (transfer spec 2.8, defects A1 to A3)."""

import pytest
from hypothesis import given

from kv_testing.layouts import make_state
from kv_testing.strategies import layout_pairs
from kv_transfer.plan.cache_state import BlockLayout, ParallelLayout
from kv_transfer.plan.compatibility import Reason, reasons


@given(layout_pairs())
def test_shape_is_no_reason(pair):
    assert reasons(pair.sender, pair.receiver) == ()
    assert reasons(pair.receiver, pair.sender) == ()


@pytest.mark.parametrize(
    ("changes", "field", "ours", "theirs"),
    [
        ({"fingerprint": "abd"}, "fingerprint", "abc", "abd"),
        ({"attention": "linear"}, "attention", "full", "linear"),
        ({"dtype": "bfloat16"}, "dtype", "float16", "bfloat16"),
        ({"head_size": 16}, "head_size", "8", "16"),
        ({"num_planes": 1}, "num_planes", "2", "1"),
        ({"num_layers": 5, "parallel": ParallelLayout.even(2, [5], 4)}, "num_layers", "4", "5"),
        ({"num_kv_heads": 2, "parallel": ParallelLayout.even(2, [4], 2)}, "num_kv_heads", "4", "2"),
        ({"windows": (8, 0, 8, 0)}, "windows", "()", "(8, 0, 8, 0)"),
        ({"chunked": True}, "chunked", "False", "True"),
        ({"layout": BlockLayout("head_major", "amx")}, "tile", "plain", "amx"),
    ],
)
def test_one_difference_is_one_reason(changes, field, ours, theirs):
    assert reasons(make_state(), make_state(**changes)) == (Reason(field, ours, theirs),)
    assert reasons(make_state(**changes), make_state()) == (Reason(field, theirs, ours),)


def test_block_sizes_must_agree_only_where_tiles_are_opaque():
    assert reasons(make_state(), make_state(tokens_per_block=32, layout=BlockLayout("token_major"))) == ()
    opaque = BlockLayout("head_major", "amx")
    assert reasons(make_state(layout=opaque), make_state(layout=opaque, tokens_per_block=32)) == (
        Reason("tokens_per_block", "16", "32"),
    )


def test_all_reasons_come_at_once_and_read_well():
    found = reasons(make_state(), make_state(fingerprint="abd", dtype="float32", head_size=4))
    assert [str(reason) for reason in found] == [
        "fingerprint differs: ours=abc, theirs=abd",
        "head_size differs: ours=8, theirs=4",
        "dtype differs: ours=float16, theirs=float32",
    ]
