"""From the sender's elements to ours, plane by plane.

In:  both CacheStates, which are compatible.
Out: a Conversion for `Formatter.concat`; None if the elements are alike.
Law: the receiver converts, after the bytes are verified and before they are scattered: what travels, and what chunks
and checksums count, are the sender's elements, whoever its receivers are.

On a GPU this is torch, into memory of the chunk's own size, before the usual scatter; a fused kernel would save that.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kv_core.spans import Span
from kv_kernels.convert import convert
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.plan.compatibility import is_converted


@dataclass(frozen=True, slots=True)
class Conversion:
    """What the elements of `theirs` become in a cache of `ours`."""

    theirs: CacheState
    ours: CacheState

    @property
    def source(self) -> torch.dtype:
        """The type of what arrives."""
        return _torch_dtype(self.theirs.dtype)

    def converted(self, dense: Tensor, layers: Span) -> Tensor:
        """`dense` [L * C, T', H', D] of these global layers, as elements of ours."""
        scales, new_scales = (side.scales_of(layers) for side in (self.theirs, self.ours))
        return convert(dense, _torch_dtype(self.ours.dtype), scales, new_scales)


def conversion_of(theirs: CacheState, ours: CacheState) -> Conversion | None:
    """What is to be done to elements of `theirs`; None if they are written as they are."""
    return Conversion(theirs, ours) if is_converted(ours, theirs) else None


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), "law: a CacheState names a type of torch's"
    return found
