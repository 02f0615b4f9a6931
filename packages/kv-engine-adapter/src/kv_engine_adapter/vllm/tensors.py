"""vLLM's cache tensors as our planes.

In:  the tensors of `register_kv_caches`, what is kept of a token, our share of the model; of codes what they are.
Out: `EngineCaches`: the planes, how a block lies in memory, and how the scheduler's block ids map to the tensors'.
Law: views only. A tensor whose axes cannot be told for certain is refused with its shape and what was expected.

Seen (shapes as registered; B blocks, T tokens a block, H heads, D head size):
    CPU, x86 without AMX, 0.25 to 0.32     [B, H, T, 2D], in truth [B, H, (K as D x T, then V as T x D)]
    CPU, other instruction sets            [B, H, T, 2D], K and V packed in a way of their own: opaque tiles
    GPU, 0.25                              [B, 2, T, H, D], permuted in memory when the layout is HND
    GPU, 0.27 and later                    [B, H, T, 2D], K and V of a token side by side
    latent rows, up to 0.27                [B, T, D]
    latent rows, later                     [B, 1, T, D]

Layers of several groups alias one memory; each tensor is read for itself, with block ids of its own group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_core.errors import CallerError
from kv_engine_adapter.orders import Tables
from kv_transfer.plan.cache_state import PLAIN, BlockLayout, Share
from kv_transfer.plan.ranges import HOLE
from kv_transfer.pools import PagedCaches, dtype_name, planes_of

if TYPE_CHECKING:
    import torch

    from kv_engine_adapter.vllm.codes import Codes
    from kv_engine_adapter.vllm.groups import ModelCaches


@dataclass(frozen=True, slots=True)
class EngineCaches:
    """One rank's caches as the transfer layer takes them."""

    caches: PagedCaches
    dtype: str
    layout: BlockLayout
    blocks_per_logical: int
    """Tensor blocks in one block of the scheduler; kernels may want smaller blocks than the scheduler hands out."""
    groups: tuple[int, ...] = (0,)
    """Which of the scheduler's groups have layers on this rank, ascending."""

    @property
    def device(self) -> "torch.device | None":
        """The CUDA device of the tensors; `None` for host memory."""
        planes = self.caches.planes
        return planes[0].device if planes and planes[0].is_cuda else None

    def kernel_tables(self, tables: Tables) -> Tables:
        """The scheduler's tables of our groups as those of the tensors, in the order of tokens; holes stay holes."""
        ratio = self.blocks_per_logical
        return tuple(
            tuple(HOLE if block == HOLE else block * ratio + part for block in tables[group] for part in range(ratio))
            for group in self.groups
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """How the axes of one tensor are to be read (see `pools.planes_of`)."""

    axes: str
    sizes: dict[str, int]
    tokens_per_block: int
    tile: str = PLAIN


def engine_caches(
    kv_caches: Mapping[str, "torch.Tensor"], model: "ModelCaches", share: Share, codes: "Codes | None" = None
) -> EngineCaches:
    """The planes of all layers of `share`; elements that are `codes` are seen as such.

    Raises `CallerError` if the tensors are not those of the share, or their axes cannot be told.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    by_layer: dict[int, torch.Tensor] = {}
    group_of: dict[int, int] = {}
    for name, tensor in kv_caches.items():
        layer = extract_layer_index(name)
        # Why: a draft model counts its layers from 0 as well; its cache must not take the place of the model's.
        if layer in by_layer and by_layer[layer].data_ptr() != tensor.data_ptr():
            raise CallerError(f"two cache tensors have layer number {layer}: {sorted(kv_caches)}")
        by_layer[layer], group_of[layer] = tensor, model.group_of.get(name, 0)
    if sorted(by_layer) != list(share.layers):
        raise CallerError(f"the engine registered layers {sorted(by_layer)}, this rank holds layers {share.layers}")
    tensors = [by_layer[layer] for layer in sorted(by_layer)]
    reading = _reading_of(tensors[0], model, codes.computed_in if codes else tensors[0].dtype)
    tensors = [codes.view_of(tensor) for tensor in tensors] if codes else tensors
    planes = [planes_of(tensor, reading.axes, **reading.sizes) for tensor in tensors]
    held = tuple(sorted(set(group_of.values())))
    groups = [held.index(group_of[layer]) for layer in share.layers] if len(held) > 1 else ()
    caches = PagedCaches.of_layers(share, planes, reading.tokens_per_block, reading.tile, groups)
    ratio = model.block_size // reading.tokens_per_block
    return EngineCaches(caches, dtype_name(tensors[0]), caches.layout, ratio, held)


def _reading_of(tensor: "torch.Tensor", spec: "ModelCaches", computed_in: "torch.dtype") -> _Reading:
    heads, size = spec.num_kv_heads, spec.head_size
    shape = tuple(tensor.shape)
    if spec.is_latent:
        return _latent(tensor, spec)
    if tensor.ndim == 4 and shape[1] == heads and shape[3] == 2 * size:
        return _packed(tensor, spec, shape[2], computed_in)
    if tensor.ndim == 5 and (shape[1], *shape[3:]) == (2, heads, size):
        return _Reading("BCTHD", {}, _tokens(shape[2], spec))
    if tensor.ndim == 5 and (shape[0], *shape[3:]) == (2, heads, size):
        return _Reading("CBTHD", {}, _tokens(shape[2], spec))
    raise CallerError(
        f"cannot tell the axes of a cache tensor: shape={shape}, expected [B, H, T, 2D], [B, 2, T, H, D] or "
        f"[2, B, T, H, D] with H={heads}, D={size}"
    )


def _latent(tensor: "torch.Tensor", spec: "ModelCaches") -> _Reading:
    shape, size = tuple(tensor.shape), spec.head_size
    if tensor.ndim == 3 and shape[2] == size:
        return _Reading("BTD", {}, _tokens(shape[1], spec))
    if tensor.ndim == 4 and (shape[1], shape[3]) == (1, size):
        return _Reading("BHTD", {}, _tokens(shape[2], spec))
    raise CallerError(
        f"cannot tell the axes of a cache tensor: shape={shape}, expected [B, T, D] or [B, 1, T, D] with D={size}"
    )


def _packed(tensor: "torch.Tensor", spec: "ModelCaches", tokens: int, computed_in: "torch.dtype") -> _Reading:
    tokens = _tokens(tokens, spec)
    if tensor.device.type != "cpu":
        return _Reading("BHT(CD)", {"C": 2, "D": spec.head_size}, tokens)
    if (isa := _cpu_isa(computed_in, spec, tokens)) in ("vec", "vec16"):
        return _Reading("BH(CDT) BH(CTD)", {"C": 2, "D": spec.head_size, "T": tokens}, tokens)
    return _Reading("BH(CD)", {"C": 2}, tokens, tile=f"vllm-cpu-{isa}")


def _cpu_isa(computed_in: "torch.dtype", spec: "ModelCaches", tokens: int) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    # Why not the type of the cache: vLLM asks with the model's, also where the cache holds codes.
    return str(_get_attn_isa(computed_in, tokens, spec.head_size))


def _tokens(tokens: int, spec: "ModelCaches") -> int:
    if spec.block_size % tokens:
        raise CallerError(f"tensor blocks do not divide the scheduler's: tensor={tokens}, scheduler={spec.block_size}")
    return tokens
