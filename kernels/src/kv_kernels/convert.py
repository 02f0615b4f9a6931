"""Element conversion: one floating point type to another, with or without scales.

In:  a dense view [P, T', H', D] in one type; the scale of each plane before and after, where elements have one.
Out: a new dense array in the other type, of the same strides.
Law: without scales bit-equal to torch's `.to()`: round to nearest even, what is too large becomes infinity, or the
largest value where a type has no infinity (float8_e4m3fn). With scales the value `element * scale` is taken in float32,
divided by the new scale, and rounded once more. NaN stays NaN.

Plain torch on every device: what converts is not a copy, and takes no kernel of ours. Planes are converted a few at a
time, so that beside the new array there is little in float32.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

SATURATING: Final = torch.float8_e4m3fn
STEP_ELEMENTS: Final = 1 << 22
"""In float32 at once, unless a plane has more."""


def convert(
    src: Tensor, dtype: torch.dtype, scales: Sequence[float] | None = None, new_scales: Sequence[float] | None = None
) -> Tensor:
    """`src` [P, T', H', D] as `dtype`; each sequence has one scale a plane. ValueError if it has not."""
    for told in (scales, new_scales):
        if told is not None and len(told) != src.shape[0]:
            raise ValueError(f"not one scale a plane: scales={len(told)}, planes={src.shape[0]}")
    out = torch.empty_like(src, dtype=dtype)
    before, after = (_factors(told, src) for told in (scales, new_scales))
    step = max(1, STEP_ELEMENTS // max(1, src[:1].numel()))
    for start in range(0, src.shape[0], step):
        some = slice(start, start + step)
        values = _values(src[some], None if before is None else before[some])
        if after is not None:
            values /= after[some]
        if dtype == SATURATING:
            # Why by hand: torch saturates by itself only in its later versions, and made NaN before.
            values.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        out[some].copy_(values)
    return out


def _values(src: Tensor, scales: Tensor | None) -> Tensor:
    """What the elements stand for, in a new float32 array: every type here is exact in it, so rounding is done once."""
    values = src.to(torch.float32, copy=True)
    return values if scales is None else values.mul_(scales)


def _factors(scales: Sequence[float] | None, like: Tensor) -> Tensor | None:
    """[P, 1, 1, 1], on the same device."""
    if scales is None:
        return None
    return torch.tensor(scales, dtype=torch.float32, device=like.device)[:, None, None, None]
