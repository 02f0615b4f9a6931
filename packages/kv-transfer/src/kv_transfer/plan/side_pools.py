"""Pools beside the keys and values of a cache, each as a cache of its own.

In:  the CacheState of keys and values, and what is kept beside them.
Out: a CacheState that plans, chunks and formatters serve like any other.
Law: layers, ranks, windows, blocks and block ids are those of the keys and values, so what is planned for one span of
     tokens is planned alike for both. A side pool is never exchanged with keys and values, nor converted. Transfer spec
     1.11, 10.5; core spec 6.1; defect H3.
"""

from typing import Final

import msgspec

from kv_core.errors import CallerError
from kv_core.spans import Span
from kv_transfer.plan.cache_state import BLOCK_SCALE, INDEXER, CacheState

FP4_PER_BYTE: Final = 2
FP4_PER_SCALE: Final = 16
"""4-bit elements: two share a byte of the cache (which then is of `uint8`), sixteen share a scale."""


def indexer_pool(state: CacheState, dim: int, quant_block: int) -> CacheState:
    """The keys of a sparse-attention index: bytes, one plane, one head on every rank.

    A token has `dim` 8-bit codes and a 4-byte scale for every `quant_block` of them.
    """
    one_head = msgspec.structs.replace(state.parallel, heads=(Span(0, 1),) * len(state.parallel.heads))
    return _beside(
        state,
        attention=INDEXER,
        dtype="uint8",
        head_size=dim + dim // quant_block * 4,
        num_planes=1,
        num_kv_heads=1,
        parallel=one_head,
    )


def scale_pool(
    state: CacheState, per_scale: int = FP4_PER_SCALE, *, packed: int = FP4_PER_BYTE, dtype: str = "float8_e4m3fn"
) -> CacheState:
    """The scales of quantised keys and values, with the same heads and planes.

    `per_scale` neighbouring values of a head share a scale of type `dtype`, and `packed` of them one element of the
    cache: 16 and 2 are NVFP4, 32 and 1 with `uint8` exponents are MXFP8. CallerError if a head does not divide.
    """
    values = state.head_size * packed
    if per_scale < 1 or packed < 1 or values % per_scale:
        raise CallerError(f"a head does not divide into scales: values={values}, per scale={per_scale}")
    return _beside(state, attention=BLOCK_SCALE, dtype=dtype, head_size=values // per_scale)


def _beside(state: CacheState, **changes: object) -> CacheState:
    return msgspec.structs.replace(state, scales=(), convert_elements=False, **changes)
