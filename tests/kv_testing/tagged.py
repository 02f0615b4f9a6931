"""Caches whose every element tells where it belongs, and the count of what a plan moves.

In:  a CacheState, and a Form in which each rank's engine keeps its tensors.
Out: a World: the caches of all ranks of one instance with one block table; `moves` of a plan as counts.
Law: a tag is a function of (layer, plane, head, token, element) alone, so a moved element can be judged by its place.
Tags are written and read by indexing single planes, never by the code under test. So are the tokens a rank holds: block
by block and layer by layer, from the rules of the spec (5.9, 5.12), never from the plan.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kv_core.ids import BlockId, Rank
from kv_core.spans import Span, ceil_div
from kv_testing.layouts import Dice, pick
from kv_transfer.orders import BlockTables
from kv_transfer.plan.cache_state import PLAIN, CacheState, Share
from kv_transfer.plan.plan import Chunk
from kv_transfer.pools import PagedCaches, planes_of

FILLER = 0xEE
"""Byte of every element that nobody has written."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

FORMS = {
    "head_major": ("CBHTD", "BCHTD", "BHT(CD)", "split BHTD", "BH(CDT) BH(CTD)"),
    "token_major": ("CBTHD", "BCTHD", "BTH(CD)", "split BTHD", "BT(CHD)"),
}
"""How engines keep the planes of a layer, by block order; "split" is one tensor per plane."""


@dataclass(frozen=True)
class World:
    """All ranks of one instance; every rank keeps a request's n-th block of its own under the same id."""

    state: CacheState
    caches: dict[Rank, PagedCaches]
    table: tuple[BlockId, ...]
    num_tokens: int

    def table_of(self, window: int) -> tuple[BlockId, ...]:
        """The block ids of the layers with this window: another order for each."""
        turn = window % max(1, len(self.table))
        return self.table[turn:] + self.table[:turn]

    def tables(self, rank: Rank, num_tokens: int | None = None) -> BlockTables:
        """What the rank's engine hands in for the sequence, or for its first tokens."""
        windows = windows_of(self.state, self.state.share_of(rank))
        return BlockTables(self.num_tokens if num_tokens is None else num_tokens, tuple(map(self.table_of, windows)))

    def blocks_of(self, rank: Rank) -> tuple[int, ...]:
        """Global ordinals of a rank's own blocks."""
        parallel = self.state.parallel
        num_blocks = ceil_div(self.num_tokens, self.state.tokens_per_block)
        ranks, context_rank = parallel.num_context_ranks, parallel.coordinates_of(rank)[2]
        owners = [
            block % ranks if parallel.context_cut == "round_robin" else _contiguous_owner(block, num_blocks, ranks)
            for block in range(num_blocks)
        ]
        return tuple(block for block, owner in enumerate(owners) if owner == context_rank)


def make_world(state: CacheState, num_tokens: int, form: str, seed: int) -> World:
    """Caches full of filler, and a shuffled block table long enough for the tokens."""
    num_blocks = ceil_div(num_tokens, state.tokens_per_block) + 2
    table = Random(seed).sample(range(num_blocks), num_blocks - 2)
    caches = {rank: make_caches(state, state.share_of(rank), num_blocks, form) for rank in state.parallel.ranks}
    return World(state, caches, tuple(BlockId(block) for block in table), num_tokens)


def draw_form(dice: Dice, state: CacheState) -> str:
    """A form in which an engine with this block order may keep its tensors."""
    if not state.layout.is_plain:
        return "split BHD"
    forms = FORMS[state.layout.order]
    return pick(dice, forms if state.num_planes == 2 else [form for form in forms if " BH(" not in form])


def make_caches(state: CacheState, share: Share, num_blocks: int, form: str) -> PagedCaches:
    """One rank's caches, full of filler, in tensors of the given form."""
    layers = [_make_layer(state, share, num_blocks, form) for _ in share.layers]
    windows = windows_of(state, share)
    groups = [windows.index(state.window_of(layer)) for layer in share.layers] if len(windows) > 1 else ()
    caches = PagedCaches.of_layers(share, layers, state.tokens_per_block, state.layout.tile, groups)
    caches.check(state, share)
    return caches


def windows_of(state: CacheState, share: Share) -> tuple[int, ...]:
    """The window of each of a rank's layer groups: layers have one block table exactly if they have one window."""
    return tuple(sorted({state.window_of(layer) for layer in share.layers})) or (0,)


def fill(world: World, tokens: Span, group: int = 0) -> None:
    """Writes the tags of these tokens into the blocks of every rank of the group; of all layers, windows or not."""
    for rank in world.state.parallel.ranks_of(group):
        for plane, tagged in _tagged_planes(world, rank, tokens, is_windowed=False):
            _words(plane).copy_(tagged)


def misplaced(world: World, tokens: Span, group: int = 0) -> int:
    """How many elements, over all ranks, differ from: tags for these tokens, filler everywhere else.

    Only ranks of the group hold these tokens, each those that it owns, and of windowed layers those that the token
    after them sees.
    """
    holders = world.state.parallel.ranks_of(group)
    return sum(
        int((_words(plane) != tagged).sum())
        for rank in world.caches
        for plane, tagged in _tagged_planes(world, rank, tokens if rank in holders else Span(0, 0), is_windowed=True)
    )


def moves(state: CacheState, chunks: Iterable[Chunk], num_tokens: int) -> npt.NDArray[np.int64]:
    """How often the chunks hold each [layer, head, token]."""
    counts = np.zeros((state.num_layers, state.num_kv_heads, num_tokens), dtype=np.int64)
    for chunk in chunks:
        layers, heads = chunk.piece.layers, chunk.piece.heads
        counts[layers.start : layers.stop, heads.start : heads.stop, chunk.tokens.start : chunk.tokens.stop] += 1
    return counts


def wanted(world_state: CacheState, rank: Rank, tokens: Span, length: int) -> npt.NDArray[np.int64]:
    """The counts that `moves` must give for one receiving rank of a sequence of this length."""
    share, world = world_state.share_of(rank), World(world_state, {}, (), length)
    counts = np.zeros((world_state.num_layers, world_state.num_kv_heads, tokens.stop + 1), dtype=np.int64)
    own, size = set(world.blocks_of(rank)), world_state.tokens_per_block
    for layer in share.layers:
        window = world_state.window_of(layer)
        first = tokens.stop - window + 1 if window else 0
        if not world_state.layout.is_plain:
            first = first // size * size
        held = [token for token in tokens if token >= first and token // size in own]
        counts[layer, share.heads.start : share.heads.stop, held] = 1
    return counts


def _make_layer(state: CacheState, share: Share, num_blocks: int, form: str) -> tuple[Tensor, ...]:
    sizes = {"C": state.num_planes, "B": num_blocks, "T": state.tokens_per_block, "H": len(share.heads)}
    sizes["D"] = state.head_size if state.layout.tile == PLAIN else state.head_size * state.tokens_per_block
    dtype: torch.dtype = getattr(torch, state.dtype)
    if form.startswith("split "):
        axes = form.removeprefix("split ")
        return tuple(planes_of(_filler(axes, sizes, dtype), axes)[0] for _ in range(state.num_planes))
    letters = form.split()[0].replace("(", "").replace(")", "")
    return planes_of(_filler(letters, sizes, dtype).flatten(form.find("(") if "(" in form else -1), form, **sizes)


def _filler(letters: str, sizes: dict[str, int], dtype: torch.dtype) -> Tensor:
    shape = [sizes[letter] for letter in letters]
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), FILLER, dtype=torch.uint8).view(dtype)


def _words(plane: Tensor) -> Tensor:
    return plane.view(WORDS[plane.dtype.itemsize])


def _contiguous_owner(block: int, num_blocks: int, ranks: int) -> int:
    """The rank that gets the block when the first ranks get one more, until none is left over."""
    shares = [num_blocks // ranks + (rank < num_blocks % ranks) for rank in range(ranks)]
    return next(rank for rank in range(ranks) if block < sum(shares[: rank + 1]))


def _tagged_planes(world: World, rank: Rank, tokens: Span, *, is_windowed: bool) -> Iterable[tuple[Tensor, Tensor]]:
    """Each plane of one rank, and what it must hold, as words."""
    caches, size = world.caches[rank], world.state.tokens_per_block
    own = {block: local for local, block in enumerate(world.blocks_of(rank))}
    for number, plane in enumerate(caches.planes):
        layer, kind = caches.first_layer + number // caches.num_planes, number % caches.num_planes
        window = world.state.window_of(layer)
        first = tokens.stop - window + 1 if window and is_windowed else 0
        if not world.state.layout.is_plain:
            first = first // size * size
        held = [token for token in tokens if token >= first and token // size in own]
        table = world.table_of(window)
        slots = [(table[own[token // size]], token % size) for token in held]
        yield plane, _tagged_plane(world, caches, (layer, kind), held, slots, _words(plane))


def _tagged_plane(
    world: World,
    caches: PagedCaches,
    layer_and_kind: tuple[int, int],
    held: list[int],
    slots: list[tuple[BlockId, int]],
    words: Tensor,
) -> Tensor:
    size, head_size = world.state.tokens_per_block, world.state.head_size
    num_blocks, num_heads = words.shape[0], words.shape[2]
    tagged = torch.full((num_blocks, size, num_heads, head_size * words.itemsize), FILLER, dtype=torch.uint8)
    elements = tagged.view(words.dtype)
    if held:
        blocks, within = torch.tensor(slots, dtype=torch.int64).unbind(1)
        heads = torch.arange(caches.heads.start, caches.heads.stop)
        elements[blocks, within] = _tags(layer_and_kind, torch.tensor(held), heads, head_size, words.dtype)
    if caches.tile == PLAIN:
        return elements
    return elements.transpose(1, 2).reshape(num_blocks, 1, num_heads, size * head_size)


def _tags(layer_and_kind: tuple[int, int], token: Tensor, heads: Tensor, head_size: int, dtype: torch.dtype) -> Tensor:
    """[tokens, heads, head_size]; distinct for 4 bytes and more, scrambled by a prime for fewer, never the filler."""
    layer, kind = layer_and_kind
    place = (layer * 2 + kind) * 64 + heads[None, :, None]
    tags = (place * 256 + token[:, None, None]) * 16 + torch.arange(head_size)[None, None, :]
    return (
        tags.to(dtype) if dtype.itemsize >= 4 else (tags * 7919 % (FILLER if dtype.itemsize == 1 else 32749)).to(dtype)
    )
