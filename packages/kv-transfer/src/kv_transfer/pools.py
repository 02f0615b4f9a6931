"""One rank's own KV cache, seen as planes whatever the engine's tensors look like.

In:  the engine's tensors, one or more per layer, with a word on how their axes are to be read; the rank's Share.
Out: PagedCaches: every plane as a strided view [B, T, H, D] of the engine's memory.
Law: only views are made; whoever writes a plane writes the engine's own block.

Legend: C planes of a layer (K and V), B blocks, T tokens per block, H heads, D head size. Where tiles are opaque a
plane is [B, 1, H, D] and D spans the whole tile of one (head, block).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch
from torch import Tensor

from kv_core.errors import CallerError
from kv_core.spans import Span
from kv_transfer.plan.cache_state import PLAIN, BlockLayout, CacheState, Share
from kv_transfer.plan.part import Geometry

PLANE_AXES: Final = "CBTHD"
DEVICES: Final = ("cpu", "cuda")
"""Kinds of memory that staging can lie in, by the names of torch's devices."""


@dataclass(frozen=True, slots=True)
class PagedCaches:
    """The planes of one rank, layer by layer and plane by plane within a layer; none on a stage without layers.

    `groups` has the layer group of each layer, from 0: layers of one group share a block table. None at all: all do.
    """

    first_layer: int
    planes: tuple[Tensor, ...]
    first_head: int
    tokens_per_block: int
    num_planes: int = 2
    tile: str = PLAIN
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.planes) % self.num_planes:
            raise CallerError(f"planes are not whole layers: planes={len(self.planes)}, per layer={self.num_planes}")
        for number, plane in enumerate(self.planes):
            _check_plane(plane, 1 if self.tile != PLAIN else self.tokens_per_block)
            _check_alike(plane, self.planes[0], self.planes[number % self.num_planes])
        if self.groups and (len(self.groups) != len(self.layers) or set(self.groups) != set(range(self.num_groups))):
            raise CallerError(f"not one group, from 0, for each layer: groups={self.groups}, layers={self.layers}")

    @classmethod
    def of_layers(
        cls,
        share: Share,
        layers: Sequence[Sequence[Tensor]],
        tokens_per_block: int,
        tile: str = PLAIN,
        groups: Sequence[int] = (),
    ) -> "PagedCaches":
        """The caches of the rank that holds `share`, from the planes of each of its layers (see `planes_of`)."""
        planes = tuple(plane for layer in layers for plane in layer)
        num_planes = len(layers[0]) if layers else 1
        first_layer, first_head = share.layers.start, share.heads.start
        caches = cls(first_layer, planes, first_head, tokens_per_block, num_planes, tile, tuple(groups))
        _check_agree("layers", caches.layers, share.layers)
        if planes:
            _check_agree("heads", caches.heads, share.heads)
        return caches

    @property
    def layers(self) -> Span:
        """Global layers held."""
        return Span(self.first_layer, self.first_layer + len(self.planes) // self.num_planes)

    @property
    def heads(self) -> Span:
        """Global KV heads held; empty if there is no layer."""
        return Span(self.first_head, self.first_head + (self.planes[0].shape[2] if self.planes else 0))

    @property
    def geometry(self) -> Geometry:
        """What `plan.part` must know of our blocks."""
        return Geometry(self.heads, self.tokens_per_block, self.tile)

    @property
    def num_groups(self) -> int:
        """Block tables that a request has here."""
        return max(self.groups, default=0) + 1

    @property
    def num_blocks(self) -> int:
        return self.planes[0].shape[0] if self.planes else 0

    @property
    def layout(self) -> BlockLayout:
        """How a block lies in memory, told from the strides."""
        heads_outside = bool(self.planes) and self.planes[0].stride(2) > self.planes[0].stride(1)
        return BlockLayout("head_major" if heads_outside else "token_major", self.tile)

    def planes_of_layers(self, layers: Span) -> tuple[Tensor, ...]:
        """The planes of some global layers, in order; CallerError if one is not held."""
        if not self.layers.covers(layers):
            raise CallerError(f"layers are not held: wanted={layers}, held={self.layers}")
        start, stop = layers.start - self.first_layer, layers.stop - self.first_layer
        return self.planes[start * self.num_planes : stop * self.num_planes]

    def by_group(self, layers: Span) -> Iterator[tuple[Span, int]]:
        """Neighbouring layers of one group, and that group, for global layers that are held."""
        if not self.groups:
            yield layers, 0
            return
        for group, run in groupby(layers, key=lambda layer: self.groups[layer - self.first_layer]):
            found = list(run)
            yield Span(found[0], found[-1] + 1), group

    def check(self, state: CacheState, share: Share) -> None:
        """CallerError unless these are the caches that `state` describes for the rank with `share`."""
        _check_agree("layers", self.layers, share.layers)
        if not self.planes:
            return
        plane = self.planes[0]
        if plane.device.type not in DEVICES:
            kinds = f"caches={plane.device.type}, stated=one of {', '.join(DEVICES)}"
            raise CallerError(f"the caches are not as stated: kind of memory: {kinds}")
        elements = state.head_size * (1 if state.layout.is_plain else state.tokens_per_block)
        _check_agree("heads", self.heads, share.heads)
        _check_agree("tokens_per_block", self.tokens_per_block, state.tokens_per_block)
        _check_agree("num_planes", self.num_planes, state.num_planes)
        _check_agree("tile", self.tile, state.layout.tile)
        _check_agree("dtype", dtype_name(plane), state.dtype)
        _check_agree("elements of a row", plane.shape[3], elements)


def planes_of(tensor: Tensor, axes: str, **sizes: int) -> tuple[Tensor, ...]:
    """The planes [B, T, H, D] of one engine tensor, as views.

    `axes` names the tensor's axes by their letters; parentheses stand for one axis (or for all that remain) in which
    several are folded, for which `sizes` gives all lengths but one. Axes left out have length 1.

        "CBTHD"               K and V stacked outside, token major
        "BCHTD"               K and V stacked inside a block, head major
        "BHT(CD)"             K and V of one token side by side
        "BHD"                 one plane of opaque tiles
        "BH(CDT) BH(CTD)"     one word per plane: K transposed within the block, V not
    """
    words = axes.split()
    views = [_plane_view(tensor, word, sizes) for word in words]
    if len(words) == 1:
        return views[0].unbind(0)
    if len(words) != len(views[0]):
        raise CallerError(f"not one word of axes per plane: words={len(words)}, planes={len(views[0])}")
    return tuple(view[number] for number, view in enumerate(views))


def dtype_name(tensor: Tensor) -> str:
    """The element type by the name it has in a CacheState."""
    return str(tensor.dtype).removeprefix("torch.")


def _plane_view(tensor: Tensor, word: str, sizes: dict[str, int]) -> Tensor:
    """A view [C, B, T, H, D]."""
    groups = [merged or single for merged, single in re.findall(r"\(([A-Z]+)\)|([A-Z])", word)]
    letters = "".join(groups)
    if len(set(letters)) != len(letters) or not set("BD") <= set(letters) <= set(PLANE_AXES):
        raise CallerError(f"unknown axes: got={word!r}, letters={PLANE_AXES}, each at most once, B and D always")
    view = tensor.view(*tensor.shape[: len(groups) - 1], -1) if tensor.ndim > len(groups) else tensor
    if view.ndim != len(groups):
        raise CallerError(f"the tensor has not these axes: shape={tuple(tensor.shape)}, axes={word!r}")
    for axis in reversed(range(len(groups))):
        if len(groups[axis]) > 1:
            view = torch.unflatten(view, axis, tuple(sizes.get(letter, -1) for letter in groups[axis]))
    for letter in set(PLANE_AXES) - set(letters):
        view, letters = view.unsqueeze(0), letter + letters
    return view.permute(*(letters.index(letter) for letter in PLANE_AXES))


def _check_plane(plane: Tensor, tokens: int) -> None:
    if plane.ndim != 4 or plane.shape[1] != tokens:
        raise CallerError(f"a plane is not [B, T, H, D]: got={tuple(plane.shape)}, T={tokens}")
    reach = 1
    for stride, length in sorted(zip(plane.stride(), plane.shape, strict=True)):
        if length > 1 and stride < reach:
            raise CallerError(f"slots of a plane overlap: shape={tuple(plane.shape)}, strides={plane.stride()}")
        reach += max(0, length - 1) * stride


def _check_alike(plane: Tensor, first: Tensor, same_kind: Tensor) -> None:
    """All planes are equal but for their address; K and V may also have different strides."""
    if (plane.shape, plane.dtype, plane.device) != (first.shape, first.dtype, first.device):
        ours, theirs = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (plane, first))
        raise CallerError(f"planes differ: one={ours}, first={theirs}")
    if plane.stride() != same_kind.stride():
        raise CallerError(f"planes of one kind differ in strides: one={plane.stride()}, first={same_kind.stride()}")


def _check_agree(what: str, cached: object, stated: object) -> None:
    if cached != stated:
        raise CallerError(f"the caches are not as stated: {what}: caches={cached}, stated={stated}")
