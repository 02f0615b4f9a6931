"""Caches whose elements are numbers, for transfers that change what an element is.

In:  a World of a floating point type, with or without scales.
Out: a sender's blocks filled with numbers that tell where they belong; the count of what a receiver has else.
Law: a number is a function of (layer, plane, head, token, element); what a receiver must hold of it follows from the
sender's element and both scales, by torch's `.to()` alone, never by the code under test.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kv_core.ids import Rank, RequestId, TransferId
from kv_core.spans import Span
from kv_testing.tagged import FILLER, World, held_by, words_of
from kv_testing.worlds import PROMPT, Side, fresh_id
from kv_transfer.plan.cache_state import CacheState


def offer_numbers(side: Side, num_tokens: int, request_id: str = "p0") -> TransferId:
    """Fills the blocks of every rank with numbers, and lets peers read them."""
    for plane, layer, kind, heads, held, place in _places(side.world, Span(0, num_tokens), is_windowed=False):
        elements = _stored(side.world.state, layer, kind, heads, held)
        words_of(plane)[place] = words_of(elements)
    side.push()
    transfer = fresh_id()
    side.door.open_offer(transfer, RequestId(request_id), PROMPT, None)
    for rank in side.world.state.parallel.ranks:
        side.ranks[rank].offer(side.make_offer(request_id, transfer, num_tokens=num_tokens, rank=rank))
    return transfer


def wrong_numbers(receiver: Side, sender: CacheState, tokens: Span) -> int:
    """Elements that differ from what the sender's would be here, and from filler everywhere else."""
    receiver.pull()
    num_wrong = 0
    for plane, layer, kind, heads, held, place in _places(receiver.world, tokens, is_windowed=True):
        expected = torch.full((plane.numel() * plane.itemsize,), FILLER, dtype=torch.uint8).view(plane.dtype)
        expected = words_of(expected).view(plane.shape)
        elements = _stored(sender, layer, kind, heads, held)
        expected[place] = words_of(_as_element(elements, sender, receiver.world.state, layer, kind))
        num_wrong += int((words_of(plane) != expected).sum())
    return num_wrong


Place = tuple[Tensor, Tensor]


def _places(
    world: World, tokens: Span, *, is_windowed: bool
) -> Iterator[tuple[Tensor, int, int, Tensor, Tensor, Place]]:
    """(plane, its layer, its kind, its heads, the tokens it holds, where: block and slot of each), of every rank."""
    for rank, caches in world.caches.items():
        heads = torch.arange(caches.heads.start, caches.heads.stop)
        for number, plane in enumerate(caches.planes):
            layer, kind = caches.first_layer + number // caches.num_planes, number % caches.num_planes
            window = world.state.window_of(layer)
            held, ordinals = held_by(world, Rank(rank), tokens, window if is_windowed else 0)
            blocks = torch.tensor(world.table_of(window))[ordinals]
            yield plane, layer, kind, heads, held, (blocks, held % world.state.tokens_per_block)


def _stored(state: CacheState, layer: int, kind: int, heads: Tensor, held: Tensor) -> Tensor:
    """[tokens, H, D]: the sender's elements, of many magnitudes and either sign."""
    element = torch.arange(state.head_size)
    number = ((layer * 2 + kind) * 97 + heads[:, None] * 31 + held[:, None, None] * 7 + element * 13) * 7919
    values = (number % 4001 - 2000) * 2.0 ** (number % 17 - 12)
    scale = _scale_of(state, layer, kind)
    return (values if scale is None else values / scale).to(torch.float32).to(_dtype_of(state))


def _as_element(elements: Tensor, sender: CacheState, receiver: CacheState, layer: int, kind: int) -> Tensor:
    before, after = _scale_of(sender, layer, kind), _scale_of(receiver, layer, kind)
    if before is None and after is None:
        return elements.to(_dtype_of(receiver))
    values = elements.float() * (1.0 if before is None else before)
    return (values if after is None else values / after).to(_dtype_of(receiver))


def _scale_of(state: CacheState, layer: int, kind: int) -> float | None:
    if not state.scales:
        return None
    if len(state.scales) == 1:
        return state.scales[0]
    return state.scales[kind if len(state.scales) == state.num_planes else layer * state.num_planes + kind]


def _dtype_of(state: CacheState) -> torch.dtype:
    found: torch.dtype = getattr(torch, state.dtype)
    return found
