"""Runs of bytes: each (token, head) in exactly one, as long as both sides' memory allows, and none outside a plane."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import CallerError
from kv_core.spans import Span
from kv_kernels.layout import MappedPlanes
from kv_transfer.direct.base import Read
from kv_transfer.in_place.runs import run_bytes, runs_of
from kv_transfer.plan.part import Part

HEAD_SIZE, ITEM = 4, 2
ROW = HEAD_SIZE * ITEM


def planes(num_blocks, tokens, heads, order, padding=0):
    """A plane [B, T, H, D] of bfloat16 at address 0, with some unused elements behind each block."""
    inner = (heads * HEAD_SIZE, HEAD_SIZE) if order == "token_major" else (HEAD_SIZE, tokens * HEAD_SIZE)
    block = tokens * heads * HEAD_SIZE + padding
    return MappedPlanes((0,), (num_blocks, tokens, heads, HEAD_SIZE), (block, *inner, 1), torch.bfloat16)


@st.composite
def sides(draw, num_tokens, num_heads):
    tokens, first_token = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.integers(0, 5))
    first_head = draw(st.integers(0, 2))
    heads = first_head + num_heads + draw(st.integers(0, 1))
    num_blocks = math.ceil((first_token + num_tokens) / tokens)
    ids = draw(st.permutations(range(num_blocks + 2)))[:num_blocks]
    held = planes(
        num_blocks + 2,
        tokens,
        heads,
        draw(st.sampled_from(["token_major", "head_major"])),
        draw(st.sampled_from([0, 8])),
    )
    return held, Part(tuple(ids), first_token, num_tokens, first_head)


@st.composite
def reads(draw):
    num_tokens, num_heads = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    (ours, target), (theirs, source) = draw(sides(num_tokens, num_heads)), draw(sides(num_tokens, num_heads))
    return Read(Span(0, 1), num_heads, source, target), ours, theirs


def address(held, part, token, head):
    position = part.first_token + token
    block, slot = part.block_ids[position // held.shape[1]], position % held.shape[1]
    at = block * held.strides[0] + slot * held.strides[1] + (part.first_head + head) * held.strides[2]
    return at * ITEM


@given(reads())
def test_every_row_lies_in_exactly_one_run(drawn):
    what, ours, theirs = drawn
    to, of, lengths = runs_of(what, ours, theirs)
    moved = sorted(
        (int(target) + i, int(source) + i)
        for target, source, length in zip(to, of, lengths, strict=True)
        for i in range(0, int(length), ROW)
    )
    grid = [(token, head) for token in range(what.target.num_tokens) for head in range(what.num_heads)]
    assert moved == sorted((address(ours, what.target, *at), address(theirs, what.source, *at)) for at in grid)
    # As long as they can be: where one run ends, the next does not go on at both ends.
    ends = zip(to[:-1] + lengths[:-1], of[:-1] + lengths[:-1], to[1:], of[1:], strict=True)
    assert all((end_to, end_of) != (next_to, next_of) for end_to, end_of, next_to, next_of in ends)


@pytest.mark.parametrize(
    ("ours", "theirs", "num_heads", "expected"),
    [
        ((16, 8, "token_major"), (16, 8, "token_major"), 8, 16 * 8),
        ((16, 8, "token_major"), (16, 8, "token_major"), 4, 4),
        ((16, 4, "token_major"), (16, 8, "token_major"), 4, 4),
        ((16, 8, "head_major"), (16, 8, "head_major"), 8, 16 * 8),
        ((16, 8, "head_major"), (16, 8, "head_major"), 2, 16 * 2),
        ((16, 4, "head_major"), (48, 8, "head_major"), 4, 16),
        ((32, 8, "head_major"), (48, 8, "head_major"), 8, 16),
        ((64, 8, "token_major"), (16, 8, "token_major"), 8, 16 * 8),
        ((16, 8, "token_major"), (16, 8, "head_major"), 8, 1),
    ],
    ids=str,
)
def test_how_long_runs_are_is_known_before(ours, theirs, num_heads, expected):
    """In rows, for whole blocks; what the real runs of such blocks come to."""
    (ours_tokens, *_), (theirs_tokens, *_) = ours, theirs
    sides = planes(8, *ours), planes(8, *theirs)
    assert run_bytes(*sides, num_heads) == expected * ROW
    both = math.lcm(ours_tokens, theirs_tokens)
    # Blocks out of order, so that none happens to continue another.
    parts = [
        Part(tuple(reversed(range(0, 2 * (both // tokens), 2))), 0, both, 0) for tokens in (ours_tokens, theirs_tokens)
    ]
    lengths = runs_of(Read(Span(0, 1), num_heads, parts[1], parts[0]), *(planes(16, *side) for side in (ours, theirs)))[
        2
    ]
    assert min(lengths) == expected * ROW


def test_what_leaves_a_plane_is_refused():
    held = planes(4, 2, 2, "token_major")
    good, block, head = Part((0, 3), 0, 4, 0), Part((0, 4), 0, 4, 0), Part((0, 3), 0, 4, 1)
    with pytest.raises(CallerError, match=r"a block is not in the planes: wanted=4, held=\[0, 4\)"):
        runs_of(Read(Span(0, 1), 2, block, good), held, held)
    with pytest.raises(CallerError, match=r"heads are not in the planes: wanted=\[1, 3\), held=\[0, 2\)"):
        runs_of(Read(Span(0, 1), 2, good, head), held, held)
    wide = MappedPlanes((0,), (4, 2, 2, 8), (32, 16, 8, 1), torch.bfloat16)
    with pytest.raises(CallerError, match="rows differ in bytes, or are not dense: ours=8 at stride 1, theirs=16"):
        runs_of(Read(Span(0, 1), 2, good, good), held, wide)
