"""Ranges on the time line of a profiler (NVTX), around what moves bytes.

In:  the device of the caches.
Out: Ranges: those of NVTX where the caches lie on a GPU, else none at all.
Law: without a GPU nothing is called. A range that spans turns of a thread is begun and ended by its number.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol

import torch


class Ranges(Protocol):
    """What is marked: "gather", "wire", "scatter", "direct read"."""

    def around(self, name: str) -> AbstractContextManager[object]:
        """A range of the calling thread."""

    def begin(self, name: str) -> Callable[[], None]:
        """A range that may end in another turn; answers how to end it."""


class NoRanges:
    """Marks nothing."""

    def around(self, name: str) -> AbstractContextManager[object]:  # noqa: ARG002
        return _NOTHING

    def begin(self, name: str) -> Callable[[], None]:  # noqa: ARG002
        return _nothing


class NvtxRanges:
    """Marks by NVTX; costs a microsecond without a profiler."""

    def __init__(self, nvtx: Any) -> None:
        """`nvtx`: torch.cuda.nvtx, or what stands for it."""
        self._nvtx = nvtx

    def around(self, name: str) -> AbstractContextManager[object]:
        found: AbstractContextManager[object] = self._nvtx.range(f"kvferry {name}")
        return found

    def begin(self, name: str) -> Callable[[], None]:
        number = self._nvtx.range_start(f"kvferry {name}")
        return lambda: self._nvtx.range_end(number)


NO_RANGES: Final = NoRanges()


def ranges_for(device: torch.device) -> Ranges:
    """The ranges of caches on this device."""
    if device.type == "cuda" and torch.cuda.is_available():
        return NvtxRanges(torch.cuda.nvtx)
    return NO_RANGES


_NOTHING: AbstractContextManager[object] = nullcontext()


def _nothing() -> None:
    """Ends nothing."""
