"""Copies of rows by numpy are the copies that torch makes, wherever they apply."""

import pytest
import torch

from kv_kernels import reference
from kv_kernels.layout import select
from kv_kernels.rows import MIN_ROW_BYTES, row_pairs

IDS = (5, 0, 7, 2)
FORMS = {
    "token major": lambda b, t, h, d: torch.empty(b, t, h, d, dtype=torch.bfloat16),
    "head major": lambda b, t, h, d: torch.empty(b, h, t, d, dtype=torch.bfloat16).transpose(1, 2),
    "K beside V in a block": lambda b, t, h, d: torch.empty(b, 2, t, h, d, dtype=torch.bfloat16)[:, 1],
    "K beside V in a row": lambda b, t, h, d: torch.empty(b, t, h, 2 * d, dtype=torch.bfloat16)[..., d:],
    "of another storage": lambda b, t, h, d: torch.empty(3, b, t, h, d, dtype=torch.bfloat16)[2],
}


def planes_of(form, tokens=16, heads=4, size=128):
    made = [FORMS[form](8, tokens, heads, size) for _ in range(3)]
    for number, plane in enumerate(made):
        content = torch.randint(-99, 99, plane.shape, generator=torch.Generator().manual_seed(number))
        plane.copy_(content)
    return made


def by_torch(monkeypatch):
    monkeypatch.setattr(reference, "row_pairs", lambda *_: None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", ["tokens first", "heads first"])
@pytest.mark.parametrize(("first_token", "num_tokens"), [(0, 64), (3, 50), (16, 32), (5, 1), (15, 2)])
@pytest.mark.parametrize(("first_head", "num_heads"), [(0, 4), (1, 2), (3, 1)])
def test_the_same_bytes_either_way(monkeypatch, form, order, first_token, num_tokens, first_head, num_heads):
    planes, at = planes_of(form), {"first_token": first_token, "first_head": first_head}
    shape = (3, num_tokens, num_heads, 128)
    dense = torch.zeros(shape, dtype=torch.bfloat16)
    if order == "heads first":
        dense = torch.zeros(3, num_heads, num_tokens, 128, dtype=torch.bfloat16).transpose(1, 2)
    other = dense.clone()
    reference.gather(dense, planes, IDS, **at)
    filled = [torch.zeros_like(plane) for plane in planes]
    reference.scatter(filled, dense, IDS, **at)
    by_torch(monkeypatch)
    reference.gather(other, planes, IDS, **at)
    assert torch.equal(dense, other)
    again = [torch.zeros_like(plane) for plane in planes]
    reference.scatter(again, dense, IDS, **at)
    assert all(map(torch.equal, filled, again))


def taken(form, dense, **at):
    planes = planes_of(form)
    return row_pairs(dense, planes, select(dense, planes, IDS, **{"first_token": 0, "first_head": 0} | at))


def test_whole_blocks_are_one_row_each_and_parts_are_as_long_as_they_lie_together():
    dense = torch.zeros(3, 64, 4, 128, dtype=torch.bfloat16)
    pairs = list(taken("token major", dense))
    assert [(len(places), ours.shape) for _, places, ours in pairs] == [(4, (4, 16 * 4 * 128))] * 3
    half = torch.zeros(3, 64, 2, 128, dtype=torch.bfloat16)
    pairs = list(taken("token major", half, first_head=2))
    assert [ours.shape for _, _, ours in pairs] == [(64, 2 * 128)] * 3


def test_short_rows_and_other_orders_are_torchs():
    few = torch.zeros(3, 64, 4, MIN_ROW_BYTES // 4, dtype=torch.bfloat16)
    planes = [torch.zeros(8, 16, 4, 2 * few.shape[3], dtype=torch.bfloat16)[..., : few.shape[3]] for _ in range(3)]
    assert row_pairs(few, planes, select(few, planes, IDS, first_token=0, first_head=0)) is None
    other_order = torch.zeros(3, 4, 64, 128, dtype=torch.bfloat16).transpose(1, 2)
    assert taken("token major", other_order) is None


def test_nothing_is_copied_of_nothing():
    assert list(taken("token major", torch.zeros(3, 0, 4, 128, dtype=torch.bfloat16))) == []
