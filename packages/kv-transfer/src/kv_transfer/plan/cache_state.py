"""What one instance says about its KV cache before anything moves.

In:  the engine's configuration, or the bytes of a peer's card.
Out: CacheState, ParallelLayout and BlockLayout, frozen values that msgspec can carry.
Law: a value that exists is whole: stages cut the layers without gap or overlap, tensor ranks cover every head
(several may hold the same one), sizes are positive and bounded. Whatever breaks this raises CallerError with both
values; while decoding, msgspec turns that into its ValidationError. Transfer spec 2.1, 2.8; defects A1, A2, A5, A7.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import msgspec

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import Span

BlockOrder = Literal["head_major", "token_major"]

PLAIN: Final = "plain"
"""The tile in which every (head, token, element) can be addressed."""

ITEM_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element of each element type, by its torch name."""

MAX_LAYERS: Final = 4096
MAX_HEADS: Final = 4096
MAX_RANKS: Final = 4096
MAX_HEAD_SIZE: Final = 65536
MAX_TOKENS_PER_BLOCK: Final = 65536
MAX_PLANES: Final = 8
MAX_NAME_LENGTH: Final = 256


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the model's cache one rank holds: global layers and global KV heads."""

    rank: Rank
    layers: Span
    heads: Span


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


class ParallelLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the layers and heads of a model are cut over the ranks of one instance.

    `layers` has one span of global layers per pipeline stage, in order, possibly empty. `heads` has one span of
    global KV heads per tensor rank; equal or overlapping spans mean that heads are held more than once.
    `rank = stage * num_tensor_ranks + tensor_rank`.
    """

    layers: tuple[Span, ...]
    heads: tuple[Span, ...]

    def __post_init__(self) -> None:
        if not self.layers or not self.heads:
            raise CallerError(f"an instance has no rank: stages={len(self.layers)}, tensor ranks={len(self.heads)}")
        if self.num_ranks > MAX_RANKS:
            raise CallerError(f"too many ranks: got={self.num_ranks}, most={MAX_RANKS}")
        _check_stages(self.layers)
        _check_heads(self.heads)

    @classmethod
    def even(cls, tp: int, layers_per_stage: Sequence[int], num_kv_heads: int) -> "ParallelLayout":
        """The usual cut: heads as evenly as they go; one head per rank when there are fewer heads than ranks."""
        bounds = [sum(layers_per_stage[:stage]) for stage in range(len(layers_per_stage) + 1)]
        starts = [rank * num_kv_heads // tp for rank in range(tp + 1)]
        return cls(
            layers=tuple(Span(start, stop) for start, stop in pairwise(bounds)),
            heads=tuple(Span(start, max(stop, start + 1)) for start, stop in pairwise(starts)),
        )

    @property
    def num_layers(self) -> int:
        return self.layers[-1].stop

    @property
    def num_kv_heads(self) -> int:
        return max(heads.stop for heads in self.heads)

    @property
    def num_ranks(self) -> int:
        return len(self.layers) * len(self.heads)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Every rank, ascending."""
        return tuple(Rank(rank) for rank in range(self.num_ranks))

    def share_of(self, rank: Rank) -> Share:
        """What `rank` holds; CallerError if the instance has no such rank."""
        if not 0 <= rank < self.num_ranks:
            raise CallerError(f"no such rank: got={rank}, ranks={self.num_ranks}")
        stage, tensor_rank = divmod(rank, len(self.heads))
        return Share(rank, self.layers[stage], self.heads[tensor_rank])


class CacheState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole KV cache of one instance, as its peers must know it.

    `fingerprint` names the weights, `num_planes` is 2 for K and V and 1 for a latent cache, `head_size` counts
    elements.
    """

    fingerprint: str
    attention: str = "full"
    dtype: str
    head_size: int
    num_planes: int = 2
    num_layers: int
    num_kv_heads: int
    tokens_per_block: int
    layout: BlockLayout
    parallel: ParallelLayout

    def __post_init__(self) -> None:
        _check_name("fingerprint", self.fingerprint)
        _check_name("attention", self.attention)
        if self.dtype not in ITEM_BYTES:
            raise CallerError(f"unknown dtype: got={self.dtype[:MAX_NAME_LENGTH]!r}, known={', '.join(ITEM_BYTES)}")
        _check_count("head_size", self.head_size, MAX_HEAD_SIZE)
        _check_count("num_planes", self.num_planes, MAX_PLANES)
        _check_count("tokens_per_block", self.tokens_per_block, MAX_TOKENS_PER_BLOCK)
        _check_agree("num_layers", self.num_layers, self.parallel.num_layers)
        _check_agree("num_kv_heads", self.num_kv_heads, self.parallel.num_kv_heads)

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


def _check_stages(layers: tuple[Span, ...]) -> None:
    expected = 0
    for stage, span in enumerate(layers):
        if span.start != expected:
            raise CallerError(f"stages leave a gap or overlap: stage={stage}, start={span.start}, expected={expected}")
        expected = span.stop
    if not 0 < expected <= MAX_LAYERS:
        raise CallerError(f"number of layers out of bounds: got={expected}, allowed=1..{MAX_LAYERS}")


def _check_heads(heads: tuple[Span, ...]) -> None:
    covered = 0
    for span in sorted(heads):
        if not span or span.start < 0 or span.stop > MAX_HEADS:
            raise CallerError(f"a tensor rank's heads are empty or out of bounds: got={span}, allowed=[0, {MAX_HEADS})")
        if span.start > covered:
            raise CallerError(f"no tensor rank holds some heads: held up to={covered}, next held={span.start}")
        covered = max(covered, span.stop)


def _check_name(field: str, name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise CallerError(f"{field} is empty or too long: characters={len(name)}, most={MAX_NAME_LENGTH}")


def _check_count(field: str, count: int, most: int) -> None:
    if not 0 < count <= most:
        raise CallerError(f"{field} out of bounds: got={count}, allowed=1..{most}")


def _check_agree(field: str, stated: int, laid_out: int) -> None:
    if stated != laid_out:
        raise CallerError(f"{field} contradicts the parallel layout: stated={stated}, laid out={laid_out}")
