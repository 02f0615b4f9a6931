"""Where each rank of a simulated instance keeps the tokens of requests, and what lies there when all is right.

In:  a shape: how layers, heads and tokens are cut, and the windows.
Out: CacheStates; Places, the constant part of one rank; Laid, one request in it. All are made once a process.
Law: an element is a number that names its request, layer, head and token; nothing here comes from the plan.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from kv_core.ids import Rank
from kv_core.spans import Span, ceil_div
from kv_testing.layouts import make_state
from kv_testing.tagged import World, windows_of
from kv_transfer.orders import BlockTables, Tables
from kv_transfer.plan.cache_state import BlockLayout, CacheState, ParallelLayout, Share
from kv_transfer.plan.context import ContextCut
from kv_transfer.plan.plan import Chunk
from kv_transfer.plan.ranges import HOLE

NUM_LAYERS, NUM_HEADS, NUM_TOKENS, MAX_REQUESTS = 2, 4, 12, 8
Elements = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@cache
def state_of(
    tp: int, stages: tuple[int, ...], tokens_per_block: int, cp: int, cut: ContextCut, windows: tuple[int, ...]
) -> CacheState:
    """8 bytes for each (layer, head, token)."""
    return make_state(
        fingerprint="model",
        dtype="float32",
        head_size=2,
        num_planes=1,
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_HEADS,
        tokens_per_block=tokens_per_block,
        windows=windows,
        layout=BlockLayout("head_major"),
        parallel=ParallelLayout.even(tp, list(stages), NUM_HEADS, cp=cp, context_cut=cut),
    )


@cache
def tags(transfer: int) -> Elements:
    """[layer, head, token] of one transfer; never 0."""
    layers, heads, tokens = np.ogrid[:NUM_LAYERS, :NUM_HEADS, :NUM_TOKENS]
    return ((transfer + 1) << 24 | layers << 16 | heads << 8 | tokens).astype(np.uint64)


class Places:
    """Where one rank keeps things: a function of the shape."""

    def __init__(self, state: CacheState, rank: Rank) -> None:
        self.share = share = state.share_of(rank)
        self.size = state.tokens_per_block
        self.num_blocks = ceil_div(NUM_TOKENS, self.size)
        self.windows = [state.window_of(layer) for layer in share.layers]
        by_group = windows_of(state, share)
        self.groups = [by_group.index(window) for window in self.windows]
        # The rule of the spec (5.9), block by block: World has it, and not from the plan.
        self.own_blocks = World(state, {}, (), NUM_TOKENS).blocks_of(rank)
        self.shape = len(share.layers), len(share.heads), MAX_REQUESTS * self.num_blocks * self.size
        """Layers, heads, and places for tokens."""
        self.tables = [self._tables(slot, by_group) for slot in range(MAX_REQUESTS)]
        """The blocks of each request, nobody else's."""

    def slot_of(self, tables: BlockTables) -> int:
        """Whose blocks these are; those of a rank that holds nothing are nobody's."""
        return next((table[0] // self.num_blocks for table in tables.by_group if table), -1)

    def _tables(self, slot: int, windows: tuple[int, ...]) -> BlockTables:
        """Layers with another window have the blocks in another order."""
        num_blocks = self.num_blocks
        table = [slot * num_blocks + (5 * block + slot) % num_blocks for block in range(num_blocks)]
        return BlockTables(NUM_TOKENS, tuple((*table[w % num_blocks :], *table[: w % num_blocks]) for w in windows))


@cache
def places_of(state: CacheState) -> list[Places]:
    """Of each rank."""
    return [Places(state, rank) for rank in state.parallel.ranks]


@dataclass(frozen=True, slots=True)
class Laid:
    """One request in the blocks of one rank."""

    tokens: list[int]
    """Global ones that are there, ascending."""
    places: Indices
    """[layer, head, token]: of each element, among all elements of the rank."""

    def before(self, stop: int) -> int:
        """How many of its tokens come before this one."""
        return bisect_left(self.tokens, stop)

    def of(self, chunk: Chunk, share: Share) -> Indices | None:
        """[layer, head, token] of the chunk; None if it has a token that is not there."""
        layers, heads, tokens = chunk.piece.layers, chunk.piece.heads, chunk.tokens
        first, stop = self.before(tokens.start), self.before(tokens.stop)
        if stop - first < len(tokens):
            return None
        layer, head = share.layers.start, share.heads.start
        return self.places[
            layers.start - layer : layers.stop - layer, heads.start - head : heads.stop - head, first:stop
        ]


@cache
def laid(places: Places, by_group: Tables, skipped: int = 0) -> Laid:
    """A request whose tables begin with the rank's own block number `skipped`."""
    size = places.size
    tokens: list[int] = []
    by_token: list[list[int]] = [[] for _ in by_group]
    for block, *found in zip(places.own_blocks[skipped:], *by_group, strict=False):
        if HOLE in found:
            continue
        own = range(block * size, min((block + 1) * size, NUM_TOKENS))
        tokens += own
        for places_of_group, place in zip(by_token, found, strict=True):
            places_of_group += [place * size + token % size for token in own]
    layers, heads, num_places = places.shape
    rows = np.arange(layers * heads).reshape(layers, heads, 1) * num_places
    return Laid(tokens, rows + np.array([by_token[group] for group in places.groups], np.int64)[:, None])


@cache
def own_tags(places: Places, transfer: int) -> Elements:
    """[layer, head, own token]: what must lie in the blocks of one request."""
    layers, heads, own = places.share.layers, places.share.heads, laid(places, places.tables[0].by_group).tokens
    return tags(transfer)[layers.start : layers.stop, heads.start : heads.stop, own]


@cache
def seen(places: Places, tokens: Span) -> Mask:
    """[layer, 1, own token]: whether what follows these tokens sees it."""
    return _from(places, tokens, [max(tokens.start, _first_seen(tokens, window)) for window in places.windows])


@cache
def wanted(places: Places, tokens: Span) -> Mask:
    """[layer, 1, own token]: whether an order of these tokens brings it: windows are cut by whole blocks."""
    size = places.size
    firsts = [max(tokens.start, _first_seen(tokens, window) // size * size) for window in places.windows]
    return _from(places, tokens, firsts)


def _first_seen(tokens: Span, window: int) -> int:
    return max(0, tokens.stop - window + 1) if window else 0


def _from(places: Places, tokens: Span, firsts: list[int]) -> Mask:
    own = np.array(laid(places, places.tables[0].by_group).tokens, np.int64)
    return np.stack([(own >= first) & (own < tokens.stop) for first in firsts])[:, None]
