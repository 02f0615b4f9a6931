"""Caches whose every element tells where it belongs, and the count of what a plan moves.

In:  a CacheState, and a Form in which each rank's engine keeps its tensors.
Out: a World: the caches of all ranks of one instance with one block table; `moves` of a plan as counts.
Law: a tag is a function of (layer, plane, head, token, element) alone, so a moved element can be judged by its place.
Tags are written and read by indexing planes, never by the code under test. So are the tokens a rank holds: by block and
layer, from the rules of the spec (5.9, 5.12), never from the plan.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
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
from kv_transfer.plan.frontier import EVERY_LAYER
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
    """All ranks of one instance; every rank keeps a request's n-th block of its own under the same id.

    Layers have one block table exactly if they have one window; or all of them have one, if `is_one_group`.
    """

    state: CacheState
    caches: dict[Rank, PagedCaches]
    table: tuple[BlockId, ...]
    num_tokens: int
    is_one_group: bool = False

    def table_of(self, window: int) -> tuple[BlockId, ...]:
        """The block ids of the layers with this window: another order for each."""
        turn = 0 if self.is_one_group else window % max(1, len(self.table))
        return self.table[turn:] + self.table[:turn]

    def tables(self, rank: Rank, num_tokens: int | None = None) -> BlockTables:
        """What the rank's engine hands in for the sequence, or for its first tokens."""
        windows = (0,) if self.is_one_group else windows_of(self.state, self.state.share_of(rank))
        return BlockTables(self.num_tokens if num_tokens is None else num_tokens, tuple(map(self.table_of, windows)))

    def blocks_of(self, rank: Rank) -> tuple[int, ...]:
        """Global ordinals of a rank's own blocks."""
        parallel = self.state.parallel
        num_blocks = ceil_div(self.num_tokens, self.state.tokens_per_block)
        ranks, context_rank = parallel.num_context_ranks, parallel.coordinates_of(rank)[2]
        each = parallel.blocks_per_deal
        num_deals = ceil_div(num_blocks, each)
        owners = [
            deal % ranks if parallel.context_cut == "round_robin" else _contiguous_owner(deal, num_deals, ranks)
            for deal in (block // each for block in range(num_blocks))
        ]
        return tuple(block for block, owner in enumerate(owners) if owner == context_rank)


def make_world(state: CacheState, num_tokens: int, form: str, seed: int, *, is_one_group: bool = False) -> World:
    """Caches full of filler, and a shuffled block table long enough for the tokens."""
    num_blocks = ceil_div(num_tokens, state.tokens_per_block) + 2
    table = Random(seed).sample(range(num_blocks), num_blocks - 2)
    caches = {rank: make_caches(state, state.share_of(rank), num_blocks, form) for rank in state.parallel.ranks}
    if is_one_group:
        caches = {rank: replace(held, groups=()) for rank, held in caches.items()}
    return World(state, caches, tuple(BlockId(block) for block in table), num_tokens, is_one_group)


def empty(world: World) -> None:
    """Makes everything filler again."""
    for caches in world.caches.values():
        for plane in caches.planes:
            words_of(plane).copy_(words_of(torch.full((plane.itemsize,), FILLER, dtype=torch.uint8).view(plane.dtype)))


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
    """The window of each of a rank's layer groups, where layers have one block table just if they have one window."""
    return tuple(sorted({state.window_of(layer) for layer in share.layers})) or (0,)


def fill(world: World, tokens: Span, group: int = 0, layers: Span = EVERY_LAYER) -> None:
    """Writes the tags of these tokens into the blocks of every rank of the group; of these layers, windows or not."""
    for rank in world.state.parallel.ranks_of(group):
        caches = world.caches[rank]
        wanted_here = {
            plane.data_ptr()
            for number, plane in enumerate(caches.planes)
            if caches.first_layer + number // caches.num_planes in layers
        }
        for planes, tagged in expected_planes(world, rank, tokens, is_windowed=False):
            for plane, content in zip(planes, tagged, strict=True):
                if plane.data_ptr() in wanted_here:
                    plane.copy_(content)


def misplaced(world: World, tokens: Span, group: int = 0) -> int:
    """How many elements, over all ranks, differ from: tags for these tokens, filler everywhere else.

    Only ranks of the group hold these tokens, each those that it owns, and of windowed layers those that the token
    after them sees.
    """
    holders = world.state.parallel.ranks_of(group)
    return sum(
        int((torch.stack(planes) != tagged).sum())
        for rank in world.caches
        for planes, tagged in expected_planes(world, rank, tokens if rank in holders else Span(0, 0), is_windowed=True)
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
    for layer in share.layers:
        held, _ = held_by(world, rank, tokens, world_state.window_of(layer))
        counts[layer, share.heads.start : share.heads.stop, held.numpy()] = 1
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


def words_of(plane: Tensor) -> Tensor:
    return plane.view(WORDS[plane.dtype.itemsize])


def _contiguous_owner(block: int, num_blocks: int, ranks: int) -> int:
    """The rank that gets the block when the first ranks get one more, until none is left over."""
    shares = [num_blocks // ranks + (rank < num_blocks % ranks) for rank in range(ranks)]
    return next(rank for rank in range(ranks) if block < sum(shares[: rank + 1]))


def expected_planes(
    world: World, rank: Rank, tokens: Span, *, is_windowed: bool = True
) -> Iterable[tuple[list[Tensor], Tensor]]:
    """The planes of each window of one rank, and what they must hold, [P, B, T, H, D]; both as words."""
    state, caches = world.state, world.caches[rank]
    by_window: dict[int, list[int]] = {}
    for number in range(len(caches.planes)):
        layer = caches.first_layer + number // caches.num_planes
        by_window.setdefault(state.window_of(layer), []).append(number)
    for window, numbers in by_window.items():
        held, ordinals = held_by(world, rank, tokens, window if is_windowed else 0)
        blocks = torch.tensor(world.table_of(window), dtype=torch.int64)[ordinals]
        yield [words_of(caches.planes[number]) for number in numbers], _tagged(state, caches, numbers, held, blocks)


def held_by(world: World, rank: Rank, tokens: Span, window: int) -> tuple[Tensor, Tensor]:
    """The tokens that the rank holds of those that the next one sees, by whole blocks; which of its blocks has each."""
    size = world.state.tokens_per_block
    first = tokens.start
    if window:
        # By whole blocks of the engine's scheduler, which may be several of ours.
        each = size * world.state.parallel.blocks_per_deal
        seen = (tokens.stop // window) * window if world.state.chunked else tokens.stop - window + 1
        first = max(first, min(seen, tokens.stop) // each * each)
    if not world.state.layout.is_plain:
        first = max(tokens.start, first // size * size)
    token = torch.arange(min(first, tokens.stop), tokens.stop)
    own = torch.tensor(world.blocks_of(rank), dtype=torch.int64)
    held = token[torch.isin(token // size, own)]
    return held, torch.searchsorted(own, held // size)


def _tagged(state: CacheState, caches: PagedCaches, numbers: list[int], held: Tensor, blocks: Tensor) -> Tensor:
    """Planes with the tags of these tokens in these blocks, and filler everywhere else."""
    size, dtype = state.tokens_per_block, WORDS[caches.planes[0].dtype.itemsize]
    shape = (len(numbers), caches.num_blocks, size, len(caches.heads), state.head_size)
    tagged = _filler("PBTHD", dict(zip("PBTHD", shape, strict=True)), dtype)
    if len(held):
        heads = torch.arange(caches.heads.start, caches.heads.stop)
        tagged[:, blocks, held % size] = _tags(_plane_ids(caches, numbers), held, heads, state.head_size, dtype)
    if caches.tile == PLAIN:
        return tagged
    return tagged.transpose(2, 3).reshape(len(numbers), caches.num_blocks, 1, len(caches.heads), -1)


def _plane_ids(caches: PagedCaches, numbers: list[int]) -> Tensor:
    """A number for each (layer, kind) of the whole model."""
    number = torch.tensor(numbers)
    return (caches.first_layer + number // caches.num_planes) * 2 + number % caches.num_planes


def _tags(plane: Tensor, token: Tensor, heads: Tensor, head_size: int, dtype: torch.dtype) -> Tensor:
    """[P, tokens, H, D]; distinct for 4 bytes and more, scrambled by a prime for fewer, never the filler."""
    place = plane[:, None, None, None] * 64 + heads[:, None]
    tags = (place * 256 + token[:, None, None]) * 16 + torch.arange(head_size)
    return (
        tags.to(dtype) if dtype.itemsize >= 4 else (tags * 7919 % (FILLER if dtype.itemsize == 1 else 32749)).to(dtype)
    )
