"""Pairs of instances that hold one model in two shapes, drawn by throwing dice.

In:  Dice: a function that gives an integer between two bounds; a plain random source is one, and Hypothesis another.
Out: a Pair: the states of sender and receiver, always compatible, and the span of tokens to move.
Law: all that the plan claims to support is drawn: tensor ranks that divide neither the heads nor each other, uneven and
empty stages on either side, heads held more than once or in overlapping spans, blocks of different size and order,
tokens dealt to context ranks either way and in any number of blocks, groups of attention data parallelism, either
numbering of ranks, latent caches, layers with windows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import TypeVar

import msgspec

from kv_core.spans import Span
from kv_transfer.plan.cache_state import (
    FULL,
    LATENT,
    PLAIN,
    BlockLayout,
    BlockOrder,
    CacheState,
    Numbering,
    ParallelLayout,
)
from kv_transfer.plan.context import ContextCut

Dice = Callable[[int, int], int]
T = TypeVar("T")

MAX_TP, MAX_PP, MAX_HEADS, MAX_LAYERS = 8, 4, 16, 10
CUTS: tuple[ContextCut, ...] = ("contiguous", "round_robin")
NUMBERINGS: tuple[Numbering, ...] = ("context_inner", "tensor_inner")
ORDERS: tuple[BlockOrder, ...] = ("head_major", "token_major")


@dataclass(frozen=True)
class Pair:
    """Tokens [0, tokens.stop) exist at the sender; `tokens` travel, from one group's ranks to one group's."""

    sender: CacheState
    receiver: CacheState
    tokens: Span
    max_bytes: int
    sender_group: int = 0
    receiver_group: int = 0
    most_layers: int = 0
    """Of one chunk; 0: all of them."""


def make_state(**changes: object) -> CacheState:
    """A small, usual state (TP 2, 4 layers, 4 heads, blocks of 16 tokens) with some fields changed."""
    return msgspec.convert(msgspec.structs.asdict(_USUAL) | changes, CacheState)


def random_pair(seed: int) -> Pair:
    """The pair with this number; always the same."""
    return draw_pair(Random(seed).randint)


def draw_pair(dice: Dice) -> Pair:
    """Two cuts of one model. About one pair in six has opaque tiles, which force equal block sizes."""
    num_heads, num_layers = dice(1, MAX_HEADS), dice(1, MAX_LAYERS)
    is_latent = not dice(0, 4)
    num_heads = 1 if is_latent else num_heads
    windows = draw_windows(dice, num_layers)
    tile = PLAIN if dice(0, 5) else "packed"
    dtype, head_size, num_planes = pick(dice, ("float32", "bfloat16", "uint8", "float64")), dice(1, 4), dice(1, 2)
    blocks = [pick(dice, (1, 2, 3, 4, 8, 16)) for _ in range(2)]
    if tile != PLAIN:
        blocks[1] = blocks[0]
    sender, receiver = (
        CacheState(
            fingerprint="model",
            attention=LATENT if is_latent else FULL,
            windows=windows,
            dtype=dtype,
            head_size=head_size,
            num_planes=num_planes,
            num_layers=num_layers,
            num_kv_heads=num_heads,
            tokens_per_block=tokens_per_block,
            layout=BlockLayout(pick(dice, ORDERS), tile),
            parallel=draw_parallel(dice, num_layers, num_heads),
        )
        for tokens_per_block in blocks
    )
    stop = dice(0, 40)
    if tile != PLAIN and windows:
        # What widening adds must not count as tokens that a window is measured from.
        stop -= stop % blocks[0]
    groups = dice(0, sender.parallel.num_groups - 1), dice(0, receiver.parallel.num_groups - 1)
    tokens, max_bytes = Span(dice(0, stop), stop), draw_max_bytes(dice, sender)
    # Drawn last: all else is as it was before there was this.
    return Pair(sender, receiver, tokens, max_bytes, *groups, pick(dice, (0, 0, 1, 2, 3)))


def draw_parallel(dice: Dice, num_layers: int, num_heads: int) -> ParallelLayout:
    """One cut: the usual one for half of the draws, else any that covers every head."""
    groups = pick(dice, (1, 1, 2, 3))
    tp = dice(1, MAX_TP // groups) * groups
    cuts = sorted(dice(0, num_layers) for _ in range(dice(1, MAX_PP) - 1))
    stages = [stop - start for start, stop in pairwise([0, *cuts, num_layers])]
    cp = pick(dice, (1, 1, 2, 3, 4))
    even = ParallelLayout.even(
        tp,
        stages,
        num_heads,
        cp=cp,
        blocks_per_deal=pick(dice, (1, 1, 2, 3)) if cp > 1 else 1,
        context_cut=pick(dice, CUTS),
        groups=groups,
        numbering=pick(dice, NUMBERINGS),
    )
    if dice(0, 1):
        return even
    return msgspec.structs.replace(even, heads=tuple(_stretched(dice, heads, num_heads) for heads in even.heads))


def draw_windows(dice: Dice, num_layers: int) -> tuple[int, ...]:
    """No windows for half of the draws, else one of three for each layer, in any order."""
    if dice(0, 1):
        return ()
    kinds = (0, dice(1, 12), dice(1, 40))
    return tuple(pick(dice, kinds) for _ in range(num_layers))


def draw_max_bytes(dice: Dice, sender: CacheState) -> int:
    """A chunk size between the smallest that fits one unit of one layer, and far more than any plan."""
    heads = max(len(heads) for heads in sender.parallel.heads)
    least = heads * sender.num_planes * sender.bytes_per_token_head * sender.tokens_per_unit
    return least * pick(dice, (1, 9, 60, 10_000))


def pick(dice: Dice, options: Sequence[T]) -> T:
    """One of the options."""
    return options[dice(0, len(options) - 1)]


def _stretched(dice: Dice, heads: Span, num_heads: int) -> Span:
    """The span, grown at either end by up to two heads: neighbours then overlap."""
    return Span(max(0, heads.start - dice(0, 2)), min(num_heads, heads.stop + dice(0, 2)))


_USUAL = CacheState(
    fingerprint="abc",
    dtype="float16",
    head_size=8,
    num_layers=4,
    num_kv_heads=4,
    tokens_per_block=16,
    layout=BlockLayout("head_major"),
    parallel=ParallelLayout.even(2, [2, 2], 4),
)
