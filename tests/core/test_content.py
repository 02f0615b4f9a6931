"""Block contents: chopping, items over blocks, common prefixes; what is inconsistent is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.content import BlockContent, ItemPart, chop, item_digest, item_parts, scope_items
from kv_core.errors import CallerError
from kv_core.spans import Span

WORDS = [0x00010203, 0x04050607, 0x08090A0B, 0x0C0D0E0F, 0x10111213, 0x14151617, 0x18191A1B, 0x1C1D1E1F]
DIGEST = bytes(range(32))


@pytest.mark.parametrize(
    ("num_usable", "allow_partial", "expected"),
    [
        (10, False, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (10, True, [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]),
        (7, True, [(0, 1, 2, 3), (4, 5, 6)]),
        (8, True, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (0, True, []),
        (-1, False, []),
    ],
)
def test_chop(num_usable, allow_partial, expected):
    assert chop(range(10), num_usable, 4, allow_partial=allow_partial) == expected


def test_chop_refuses_more_than_there_is():
    with pytest.raises(CallerError, match=r"num_usable=11, num_tokens=10"):
        chop(range(10), 11, 4, allow_partial=True)


@given(st.lists(st.integers()), st.integers(1, 5))
def test_chop_keeps_every_token_in_order(tokens, tokens_per_block):
    runs = chop(tokens, len(tokens), tokens_per_block, allow_partial=True)
    assert [token for run in runs for token in run] == tokens
    assert all(len(run) == tokens_per_block for run in runs[:-1])


@pytest.mark.parametrize(("start", "expected"), [(0, (ItemPart(DIGEST, 0),)), (4, (ItemPart(DIGEST, 2),)), (8, ())])
def test_item_over_blocks(start, expected):
    """Core spec 1.4: blocks of 4 tokens, an item of 6 tokens from token 2 on."""
    assert item_parts([WORDS], [2], [6], Span(start, start + 4)) == expected


def test_negative_words_are_twos_complement():
    assert item_digest([-1, -2, 0, 1, 2, 3, 4, 5]).hex() == "fffffffffffffffe" + "".join(f"{n:08x}" for n in range(6))


@pytest.mark.parametrize(("positions", "lengths"), [([2, 5], [4]), ([2], [4, 4]), ([], [4]), ([], [])])
def test_unequal_lists_are_refused(positions, lengths):  # core spec D13
    with pytest.raises(CallerError, match=f"positions={len(positions)}, lengths={len(lengths)}"):
        item_parts([WORDS], positions, lengths, Span(0, 4))


def test_items_of_a_scope():
    assert scope_items([WORDS], [2], [6]) == ((DIGEST, 2),)
    with pytest.raises(CallerError, match="positions=2, lengths=1"):
        scope_items([WORDS], [2, 5], [4])
    with pytest.raises(CallerError, match=r"lengths=\[0\]"):
        scope_items([WORDS], [2], [0])


def test_a_digest_of_seven_words_is_refused():
    with pytest.raises(CallerError, match="theirs=7"):
        item_digest(WORDS[:7])


def test_no_items_no_parts():
    assert item_parts([], [], [], Span(0, 4)) == ()


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (BlockContent((1, 2, 3, 4)), BlockContent((1, 2, 9, 4)), 2),
        (BlockContent((1, 2, 3), lora_id=1), BlockContent((1, 2, 3), lora_id=2), 0),
        (BlockContent((1, 2, 3), lora_id=0), BlockContent((1, 2, 3)), 0),
        (BlockContent((1, 2, 3), salt=0), BlockContent((1, 2, 3)), 0),
        (BlockContent((1, 2, 3), extra_ids=(0, 0, 1)), BlockContent((1, 2, 3), extra_ids=(0, 0, 2)), 2),
        # core spec D53: "no extra ids" differs from extra ids of 0
        (BlockContent((1, 2, 3), extra_ids=(0, 0, 0)), BlockContent((1, 2, 3)), 0),
        (BlockContent((1, 2), items=(ItemPart(DIGEST, 0),)), BlockContent((1, 2)), 0),
        (BlockContent((1, 2), items=(ItemPart(DIGEST, 0),)), BlockContent((1, 3), items=(ItemPart(DIGEST, 0),)), 1),
    ],
)
def test_common_prefix(ours, theirs, expected):
    assert ours.common_prefix(theirs) == expected == theirs.common_prefix(ours)


def test_extra_ids_come_one_a_token():
    with pytest.raises(CallerError, match="tokens=2, extra_ids=1"):
        BlockContent((1, 2), extra_ids=(0,))
