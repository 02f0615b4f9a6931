"""How a copy is spread over a GPU: measured defaults, which callers may override.

In:  nothing.
Out: a Tuning for each kind of copy.
Law: a Tuning changes how long a copy takes and how much of the GPU it occupies, never what it writes.
"""

from dataclasses import dataclass
from typing import Final

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tuning:
    """`tile_words`: words of at most 8 bytes that one program moves at a time. `num_warps`: of one program.

    `num_programs`: most programs at once, each of which then moves many tiles; None: a program for every tile.
    """

    tile_words: int
    num_warps: int
    num_programs: int | None = None


LOCAL: Final = Tuning(tile_words=1024, num_warps=8)
"""Within one GPU: one access of 16 bytes a thread.

Evidence: H200, 2026-11-30, `tools/bench/kernels.py --sweep`: best or within 2 % of it in every case of nine tunings.
"""

SUMMING: Final = Tuning(tile_words=1024, num_warps=8, num_programs=4224)
"""Within one GPU, when each program also tells a sum: so many programs that few sums are told.

Evidence: H200, 2026-11-30, `tools/bench/kernels.py --parts parts`, blocks of 16 tokens in both orders: with sums 1,836
to 1,928 GB/s, with half as many programs 1,803 to 1,889, with one for each tile 1,382 to 1,654; without sums 2,010 to
2,082.
"""

PEER: Final = Tuning(tile_words=4096, num_warps=8, num_programs=64)
"""From another GPU of the host: the link is full with half of the GPU, and the model keeps the rest.

Evidence: two H200s over NVLink, 2026-11-30, `tools/bench/peer_copy.py --sweep`: within 1 % of the best in every case.
"""

HOST: Final = Tuning(tile_words=2048, num_warps=4, num_programs=64)
"""To or from pinned memory of the host: few programs fill the bus, and the model keeps the rest."""


def tuning_for(dense: Tensor) -> Tuning:
    """The default of a gather into, or a scatter from, this dense view of a GPU's planes."""
    return LOCAL if dense.is_cuda else HOST
