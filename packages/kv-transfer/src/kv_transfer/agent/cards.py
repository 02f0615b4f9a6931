"""What leaves the process so that a peer can move bytes into or out of our memory.

In:  nothing; these are values.
Out: `AgentCard` (how to reach an agent), `DirectCard` (how to map a rank's caches) and `RemoteSlice` (where bytes lie).
Law: torch-free and bounded; a decoded card or slice is in range, but whether it lies in memory that was granted
     is for the writer to check against the grant (transfer spec 14 E15).
"""

from typing import Annotated, Literal

import msgspec

MemoryKind = Literal["host", "device"]
"""Which memory a region is: of the host, or of an accelerator."""

MAX_NAME_CHARS = 200
"""The bound of every name on the wire: of agents, instances, incarnations and consumers."""
MAX_BLOB_BYTES = 1 << 20

Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
NumBytes = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
DeviceId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class RemoteSlice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`num_bytes` bytes at `address` in the address space of a peer; `device_id` is 0 for host memory."""

    address: Address
    num_bytes: NumBytes
    kind: MemoryKind
    device_id: DeviceId


class AgentCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a peer must know to reach an agent: its kind, its name (of one incarnation), and the agent's own blob."""

    kind: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    blob: Annotated[bytes, msgspec.Meta(max_length=MAX_BLOB_BYTES)]


class DirectCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a peer must know to map a rank's caches: the kind of path, the host on which it works, and its own blob."""

    kind: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    blob: Annotated[bytes, msgspec.Meta(max_length=MAX_BLOB_BYTES)]
