"""Every number that was measured and decides which way bytes go, in one table.

In:  nothing.
Out: thresholds, each with what it was measured on, when, and by which command.
Law: a number that stands here is overridden by its setting in `TransferConfig`, never by code elsewhere. `kvferry bench
     paths` measures those of the path again, on the machine it runs on.
"""

from dataclasses import dataclass
from typing import Final, Literal

KIB: Final = 1 << 10
MIB: Final = 1 << 20
NEVER: Final = 1 << 40
"""Bytes; longer than any run."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """`num_bytes`, and where it is from; `evidence` says what was seen, or from what it was computed. Without a command
    it was not measured."""

    num_bytes: int
    machine: str
    date: str
    command: str
    evidence: str


Link = Literal["shared memory", "network", "device"]
"""Over what an agent reads in place: the shared memory of a host, any other way between memory of hosts, or GPUs."""

IN_PLACE_RUN: Final[dict[Link, Threshold]] = {
    "shared memory": Threshold(
        16 * KIB,
        "2 cores of an AMD EPYC",
        "2026-11-30",
        "python tools/bench/transfer.py --mib 256",
        "runs of 4 KiB: staged 0.81 GB/s, in place 0.62; of 32 KiB: 0.97 and 2.87",
    ),
    "network": Threshold(
        NEVER,
        "2 cores of an AMD EPYC, UCX_TLS=tcp",
        "2026-11-30",
        "python tools/bench/transfer.py --mib 512 --transports tcp",
        "runs of 4 KiB: staged 0.87 GB/s, in place 0.51; of 256 KiB: 0.98 and 0.85. RDMA was not measured",
    ),
    "device": Threshold(
        MIB,
        "2x NVIDIA H200, NVLink",
        "2026-11",
        "one NIXL READ of 1 GiB, whole and in pieces",
        "computed: pieces of 64 KiB carry 14 GB/s, 4.7 us a piece, in which staging carries 0.5 MB",
    ),
}
"""Shortest run that is read in place rather than staged."""

CHUNK: Final = {
    "cpu": Threshold(
        8 * MIB,
        "2 cores of an AMD EPYC",
        "2026-11-30",
        "python tools/bench/transfer.py --mib 512 --sizes 4 --transports shm --chunks 1 2 4 16 32",
        "0.53, 0.86, 1.16 GB/s with 1, 2, 4 MiB; 1.42, 1.35, 1.47 with 8, 16, 32: a chunk costs messages and turns of"
        " threads, and a few must fit into the arenas of a small host",
    ),
    "cuda": Threshold(
        256 * MIB,
        "2x NVIDIA H200, NVLink",
        "2026-11-30",
        "python tools/bench/gpu_paths.py --cases large",
        "a chunk costs the host the same whatever its size: 46, 86, 148 GB/s with 64, 128, 256 MiB; with 512 MiB and"
        " arenas of 4 GiB 220, for 8 GiB of the GPU",
    ),
}
"""Largest chunk, by the device of the caches."""

DEVICE_POST: Final = Threshold(
    256 * MIB,
    "2x NVIDIA H200, NVLink",
    "2026-11-30",
    "python tools/bench/gpu_paths.py --cases swept",
    "chunks of 128 MiB: 60 GB/s in posts of 16 MiB, 69 in one post",
)
"""Most bytes of one post to NIXL between GPUs, where a post does not block while bytes move."""

ARENA: Final = Threshold(
    2 << 30,
    "2x NVIDIA H200, NVLink",
    "2026-11-30",
    "python tools/bench/gpu_paths.py --cases swept",
    "four chunks of 256 MiB under way to one peer, which may have half of an arena",
)
"""Largest arena on a GPU that nobody has asked for."""
