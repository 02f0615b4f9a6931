"""Element conversion: one floating point type to another, with or without scales.

In:  a dense view [P, T', H', D] in one type; the scale of each plane before and after, where elements have one.
Out: a new dense array in the other type, of the same strides.
Law: without scales bit-equal to torch's `.to()`: round to nearest even, what is too large becomes infinity, or the
largest value where a type has no infinity (float8_e4m3fn). With scales the value `element * scale` is taken in float32,
divided by the new scale, and rounded once more. NaN stays NaN.

Plain torch on every device: what converts is not a copy, and takes no kernel of ours.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SATURATING = torch.float8_e4m3fn


def convert(
    src: Tensor, dtype: torch.dtype, scales: Sequence[float] | None = None, new_scales: Sequence[float] | None = None
) -> Tensor:
    """`src` [P, T', H', D] as `dtype`; each sequence has one scale a plane. ValueError if it has not."""
    for told in (scales, new_scales):
        if told is not None and len(told) != src.shape[0]:
            raise ValueError(f"not one scale a plane: scales={len(told)}, planes={src.shape[0]}")
    # Every type here is exact in float32, so that a detour over it rounds once.
    values = src.to(torch.float32, copy=src.dtype == torch.float32)
    if scales is not None:
        values *= _factors(scales, src)
    if new_scales is not None:
        values /= _factors(new_scales, src)
    if dtype == SATURATING:
        # Why by hand: torch saturates by itself only in its later versions, and made NaN before.
        largest = torch.finfo(dtype).max
        values.clamp_(-largest, largest)
    return values.to(dtype)


def _factors(scales: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(scales, dtype=torch.float32, device=like.device)[:, None, None, None]
