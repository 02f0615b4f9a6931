"""What one instance says about its KV cache before anything moves.

In:  the engine's configuration, or the bytes of a peer's card.
Out: CacheState, ParallelLayout and BlockLayout, frozen values that msgspec can carry.
Law: a value that exists is whole: stages cut the layers without gap or overlap, the tensor ranks of each group cover
every head (several may hold the same one), sizes are positive and bounded. Whatever breaks this raises CallerError with
both values; while decoding, msgspec turns that into its ValidationError. Transfer spec 1, 2.1, 2.8; defects A1, A5 to
A8, A11.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Final, Literal

import msgspec

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import Span
from kv_transfer.plan.context import ContextCut, TokenShare
from kv_transfer.plan.elements import ITEM_BYTES, check_elements, each_scale

BlockOrder = Literal["head_major", "token_major"]
Numbering = Literal["context_inner", "tensor_inner"]

PLAIN: Final = "plain"
"""The tile in which every (head, token, element) can be addressed."""

FULL: Final = "full"
LATENT: Final = "latent"
INDEXER: Final = "indexer"
BLOCK_SCALE: Final = "block_scale"
"""Kinds of attention that have a formatter."""

MAX_LAYERS: Final = 4096
MAX_HEADS: Final = 4096
MAX_RANKS: Final = 4096
MAX_HEAD_SIZE: Final = 65536
MAX_TOKENS_PER_BLOCK: Final = 65536
MAX_PLANES: Final = 8
MAX_NAME_LENGTH: Final = 256
MAX_WINDOW: Final = 2**31


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the model's cache one rank holds: global layers and KV heads; of each sequence, a context share."""

    rank: Rank
    layers: Span
    heads: Span
    context_rank: int = 0


class BlockLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one block lies in memory.

    `head_major` is [head][token][element], `token_major` is [token][head][element]. A tile other than "plain" names
    an opaque packing of the tokens of one (head, block): it moves only whole, and only to the same tile name and
    block size.
    """

    order: BlockOrder
    tile: str = PLAIN

    def __post_init__(self) -> None:
        _check_name("tile", self.tile)

    @property
    def is_plain(self) -> bool:
        """Whether single tokens can be addressed."""
        return self.tile == PLAIN


class ParallelLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the layers and heads of a model, and the tokens of a sequence, are cut over the ranks of one instance.

    `layers` has one span of global layers per pipeline stage, in order, possibly empty. `heads` has one span of
    global KV heads per tensor rank; equal or overlapping spans mean that heads are held more than once. With attention
    data parallelism the tensor ranks are `num_groups` neighbouring groups, each of which holds every head; a request
    lives in one of them. `num_context_ranks` ranks share the tokens of each sequence, by `context_cut`: they are dealt
    `blocks_per_deal` blocks at a time, more than one where an engine's scheduler hands out larger blocks than its
    kernels use.

        context_inner   rank = (stage * num_tensor_ranks + tensor_rank) * num_context_ranks + context_rank
        tensor_inner    rank = (stage * num_context_ranks + context_rank) * num_tensor_ranks + tensor_rank
    """

    layers: tuple[Span, ...]
    heads: tuple[Span, ...]
    num_context_ranks: int = 1
    context_cut: ContextCut = "contiguous"
    num_groups: int = 1
    numbering: Numbering = "context_inner"
    blocks_per_deal: int = 1

    def __post_init__(self) -> None:
        if not self.layers or not self.heads or self.num_context_ranks < 1:
            sizes = f"stages={len(self.layers)}, tensor ranks={len(self.heads)}, context ranks={self.num_context_ranks}"
            raise CallerError(f"an instance has no rank: {sizes}")
        if self.num_ranks > MAX_RANKS:
            raise CallerError(f"too many ranks: got={self.num_ranks}, most={MAX_RANKS}")
        if self.num_groups < 1 or len(self.heads) % self.num_groups:
            raise CallerError(
                f"groups do not divide the tensor ranks: groups={self.num_groups}, tensor ranks={len(self.heads)}"
            )
        _check_count("blocks_per_deal", self.blocks_per_deal, MAX_TOKENS_PER_BLOCK)
        _check_stages(self.layers)
        width = len(self.heads) // self.num_groups
        _check_groups([self.heads[first : first + width] for first in range(0, len(self.heads), width)])

    @classmethod
    def even(
        cls,
        tp: int,
        layers_per_stage: Sequence[int],
        num_kv_heads: int,
        *,
        cp: int = 1,
        context_cut: ContextCut = "contiguous",
        groups: int = 1,
        numbering: Numbering = "context_inner",
        blocks_per_deal: int = 1,
    ) -> "ParallelLayout":
        """The usual cut: heads as evenly as they go in each group; one head per rank when they are fewer than ranks."""
        if groups < 1 or tp % groups:
            raise CallerError(f"groups do not divide the tensor ranks: groups={groups}, tensor ranks={tp}")
        bounds = [sum(layers_per_stage[:stage]) for stage in range(len(layers_per_stage) + 1)]
        width = tp // groups
        starts = [rank * num_kv_heads // width for rank in range(width + 1)]
        heads = tuple(Span(start, max(stop, start + 1)) for start, stop in pairwise(starts))
        return cls(
            layers=tuple(Span(start, stop) for start, stop in pairwise(bounds)),
            heads=heads * groups,
            num_context_ranks=cp,
            context_cut=context_cut,
            num_groups=groups,
            numbering=numbering,
            blocks_per_deal=blocks_per_deal,
        )

    @property
    def num_layers(self) -> int:
        return self.layers[-1].stop

    @property
    def num_kv_heads(self) -> int:
        return max(heads.stop for heads in self.heads)

    @property
    def num_ranks(self) -> int:
        return len(self.layers) * len(self.heads) * self.num_context_ranks

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Every rank, ascending."""
        return tuple(Rank(rank) for rank in range(self.num_ranks))

    def rank_at(self, stage: int, tensor_rank: int, context_rank: int = 0) -> Rank:
        """The rank with these coordinates."""
        if self.numbering == "context_inner":
            return Rank((stage * len(self.heads) + tensor_rank) * self.num_context_ranks + context_rank)
        return Rank((stage * self.num_context_ranks + context_rank) * len(self.heads) + tensor_rank)

    def coordinates_of(self, rank: Rank) -> tuple[int, int, int]:
        """(stage, tensor rank, context rank); CallerError if the instance has no such rank."""
        if not 0 <= rank < self.num_ranks:
            raise CallerError(f"no such rank: got={rank}, ranks={self.num_ranks}")
        stage, inner = divmod(rank, len(self.heads) * self.num_context_ranks)
        if self.numbering == "context_inner":
            return stage, *divmod(inner, self.num_context_ranks)
        context_rank, tensor_rank = divmod(inner, len(self.heads))
        return stage, tensor_rank, context_rank

    def tensor_ranks_of(self, group: int) -> range:
        """The tensor ranks of one group; CallerError if there is no such group."""
        if not 0 <= group < self.num_groups:
            raise CallerError(f"no such group: got={group}, groups={self.num_groups}")
        width = len(self.heads) // self.num_groups
        return range(group * width, (group + 1) * width)

    def ranks_of(self, group: int) -> tuple[Rank, ...]:
        """The ranks that hold the requests of one group, ascending."""
        width = self.tensor_ranks_of(group)
        return tuple(rank for rank in self.ranks if self.coordinates_of(rank)[1] in width)

    def num_copies(self, head: int, group: int = 0) -> int:
        """On how many tensor ranks of one group this KV head lies; 0 if the model has no such head."""
        return sum(head in self.heads[tensor_rank] for tensor_rank in self.tensor_ranks_of(group))

    def share_of(self, rank: Rank) -> Share:
        """What `rank` holds; CallerError if the instance has no such rank."""
        stage, tensor_rank, context_rank = self.coordinates_of(rank)
        return Share(rank, self.layers[stage], self.heads[tensor_rank], context_rank)


class CacheState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The whole KV cache of one instance, as its peers must know it.

    `fingerprint` names the weights, `num_planes` is 2 for K and V and 1 for a latent cache, `head_size` counts
    elements. `windows` has the attention window of each layer in tokens, 0 where a layer sees all; none at all if every
    layer does; a window slides, or if `chunked` begins at the last multiple of its size. `scales` are those of the
    elements (see `elements`); `convert_elements`: what comes from a peer whose elements differ, and who asks for it
    too, is converted.
    """

    fingerprint: str
    # Why factories: what has one is told to peers even if it is usual, as peers of this wire version expect.
    attention: str = msgspec.field(default_factory=lambda: FULL)
    dtype: str
    head_size: int
    num_planes: int = msgspec.field(default_factory=lambda: 2)
    num_layers: int
    num_kv_heads: int
    tokens_per_block: int
    layout: BlockLayout
    parallel: ParallelLayout
    windows: tuple[int, ...] = ()
    scales: tuple[float, ...] = ()
    convert_elements: bool = False
    chunked: bool = False

    def __post_init__(self) -> None:
        _check_name("fingerprint", self.fingerprint)
        _check_name("attention", self.attention)
        _check_count("head_size", self.head_size, MAX_HEAD_SIZE)
        _check_count("num_planes", self.num_planes, MAX_PLANES)
        check_elements(self.dtype, self.scales, self.num_layers, self.num_planes)
        _check_count("tokens_per_block", self.tokens_per_block, MAX_TOKENS_PER_BLOCK)
        _check_agree("num_layers", self.num_layers, self.parallel.num_layers)
        _check_agree("num_kv_heads", self.num_kv_heads, self.parallel.num_kv_heads)
        if self.attention == LATENT and self.num_kv_heads != 1:
            raise CallerError(f"a latent cache has one head: got={self.num_kv_heads}, allowed=1")
        if self.windows and (
            len(self.windows) != self.num_layers or not all(0 <= w <= MAX_WINDOW for w in self.windows)
        ):
            raise CallerError(
                f"windows are not one of 0..{MAX_WINDOW} for each layer: "
                f"got={len(self.windows)}, layers={self.num_layers}"
            )

    @property
    def bytes_per_token_head(self) -> int:
        """Bytes of one token of one head in one plane of one layer."""
        return self.head_size * ITEM_BYTES[self.dtype]

    @property
    def tokens_per_unit(self) -> int:
        """The fewest neighbouring tokens that can move alone: 1, or a block if its tiles are opaque."""
        return 1 if self.layout.is_plain else self.tokens_per_block

    def share_of(self, rank: Rank) -> Share:
        """What `rank` of this instance holds."""
        return self.parallel.share_of(rank)

    def token_share(self, context_rank: int, num_tokens: int) -> TokenShare:
        """What one context rank holds of a sequence of this length."""
        cut, ranks, dealt = (
            self.parallel.context_cut,
            self.parallel.num_context_ranks,
            self.parallel.blocks_per_deal,
        )
        return TokenShare(cut, ranks, context_rank, self.tokens_per_block, num_tokens, dealt)

    @property
    def tokens_per_allocation(self) -> int:
        """Tokens of what the engine's scheduler hands out as one block."""
        return self.tokens_per_block * self.parallel.blocks_per_deal

    def window_of(self, layer: int) -> int:
        """The attention window of a global layer; 0 if it sees all tokens."""
        return self.windows[layer] if self.windows else 0

    def scales_of(self, layers: Span) -> tuple[float, ...] | None:
        """The scale of each plane of some global layers, layer by layer; None if elements have none."""
        return each_scale(self)[layers.start * self.num_planes : layers.stop * self.num_planes] or None


def _check_stages(layers: tuple[Span, ...]) -> None:
    expected = 0
    for stage, span in enumerate(layers):
        if span.start != expected:
            raise CallerError(f"stages leave a gap or overlap: stage={stage}, start={span.start}, expected={expected}")
        expected = span.stop
    if not 0 < expected <= MAX_LAYERS:
        raise CallerError(f"number of layers out of bounds: got={expected}, allowed=1..{MAX_LAYERS}")


def _check_groups(groups: Sequence[Sequence[Span]]) -> None:
    held = {_num_heads(heads) for heads in groups}
    if len(held) > 1:
        raise CallerError(f"groups hold different numbers of heads: got={sorted(held)}")


def _num_heads(heads: Sequence[Span]) -> int:
    """How many heads the tensor ranks of one group hold; CallerError if they leave one out."""
    covered = 0
    for span in sorted(heads, key=attrgetter("start")):
        if not 0 <= span.start < span.stop <= MAX_HEADS:
            raise CallerError(f"a tensor rank's heads are empty or out of bounds: got={span}, allowed=[0, {MAX_HEADS})")
        if span.start > covered:
            raise CallerError(f"no tensor rank holds some heads: held up to={covered}, next held={span.start}")
        covered = max(covered, span.stop)
    return covered


def _check_name(field: str, name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise CallerError(f"{field} is empty or too long: characters={len(name)}, most={MAX_NAME_LENGTH}")


def _check_count(field: str, count: int, most: int) -> None:
    if not 0 < count <= most:
        raise CallerError(f"{field} out of bounds: got={count}, allowed=1..{most}")


def _check_agree(field: str, stated: int, laid_out: int) -> None:
    if stated != laid_out:
        raise CallerError(f"{field} contradicts the parallel layout: stated={stated}, laid out={laid_out}")
