"""A checksum of staged bytes that is as fast as memory, on a CPU and on a GPU.

In:  a uint8 tensor, any length, starting at a multiple of 8 bytes.
Out: a signed 64-bit number.
Law: the bytes are read as little-endian 64-bit words w[i], the last one filled up with zeroes; the checksum is
     sum(w[i] * k[i]) modulo 2**64, with k[i] = mix(i) | 1. Every k is odd, so no change of one word goes unnoticed.
     It detects accidents, not forgeries; the length is checked apart.

On a GPU one kernel reads the bytes and nothing else, and the number is known when the stream has come so far: nobody
waits for it there (`Pending`).

Evidence: one core of an AMD EPYC, 8 MiB in memory, 2026-11-30: this 7 GB/s, zlib.crc32 2.5 GB/s.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kv_kernels.weighted_sum import MIX, weighted_sum

_WORD_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Pending:
    """A checksum that a stream computes: it is in pinned memory, int64 [1], when the stream has come so far."""

    pinned: Tensor

    def known(self) -> int:
        """The number; the caller has seen that the stream has come so far."""
        return int(self.pinned[0])


def known(found: "int | Pending | None") -> Generator[None, None, int | None]:
    """A step of a job (see `mover`): the number, at once or when what is queued is over."""
    if not isinstance(found, Pending):
        return found
    yield
    return found.known()


class Summer:
    """Computes checksums of tensors of one device; on a CPU keeps the weights of the longest so far. Of one thread."""

    def __init__(self) -> None:
        self._weights = torch.empty(0, dtype=torch.int64)

    def checksum(self, staged: Tensor) -> int | Pending:
        """The checksum of `staged`, uint8 [n]; on a GPU queued on the current stream."""
        if staged.is_cuda:
            total = weighted_sum(_padded(staged))
            pinned = torch.empty(1, dtype=torch.int64, pin_memory=True)
            pinned.copy_(total, non_blocking=True)
            return Pending(pinned)
        num_words, rest = divmod(staged.numel(), _WORD_BYTES)
        weights = self._weights_for(num_words + 1)
        words = staged[: num_words * _WORD_BYTES].view(torch.int64)
        total = torch.dot(words, weights[:num_words])
        if rest:
            total = total + _padded(staged[num_words * _WORD_BYTES :])[0] * weights[num_words]
        return int(total.item())

    def checksum_now(self, staged: Tensor) -> int:
        """The same, waited for."""
        found = self.checksum(staged)
        if not isinstance(found, Pending):
            return found
        torch.cuda.current_stream(staged.device).synchronize()
        return found.known()

    def _weights_for(self, num_words: int) -> Tensor:
        if self._weights.numel() < num_words:
            self._weights = weights(max(num_words, 2 * self._weights.numel()))
        return self._weights


def weights(num_words: int) -> Tensor:
    """k[0 .. num_words), int64: the finalizer of MurmurHash3 over i + 1, made odd."""
    mixed = torch.arange(1, num_words + 1, dtype=torch.int64)
    for factor in MIX:
        mixed = (mixed ^ _shifted(mixed)) * factor
    return (mixed ^ _shifted(mixed)) | 1


def _shifted(words: Tensor) -> Tensor:
    """Each word shifted right by 33 bits, zeroes coming in."""
    return (words >> 33) & ((1 << 31) - 1)


def _padded(staged: Tensor) -> Tensor:
    """As words, int64, the last one filled up with zeroes: a view if there is nothing to fill up."""
    if (missing := -staged.numel() % _WORD_BYTES) == 0:
        return staged.view(torch.int64)
    padded = staged.new_zeros(staged.numel() + missing)
    padded[: staged.numel()] = staged
    return padded.view(torch.int64)
