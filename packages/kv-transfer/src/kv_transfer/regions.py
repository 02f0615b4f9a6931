"""Memory that the wire may touch.

In:  a size, and for an accelerator its device.
Out: a `Region`, whole pages of zeroed bytes at a fixed address; `RegionSlice`, a part of one.
Law: what the wire writes is our own memory, never an engine's blocks; those may be in a region to be read. A slice
     lies inside its region. Making a region does not register it: an agent does (`Agent.register`), and the region must
     outlive its registration.
"""

import mmap
from dataclasses import dataclass, field

import torch

from kv_core.errors import CallerError
from kv_transfer.agent.cards import MemoryKind, RemoteSlice

PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """`num_bytes` bytes at `address`, kept alive by `memory` (uint8 [num_bytes]); equal only to itself.

    `device_id` is 0 for host memory.
    """

    address: int
    num_bytes: int
    kind: MemoryKind
    device_id: int
    memory: torch.Tensor = field(repr=False)

    def slice(self, offset: int, num_bytes: int) -> "RegionSlice":
        """A part of this region."""
        return RegionSlice(self, offset, num_bytes)

    @property
    def whole(self) -> "RegionSlice":
        """All of this region."""
        return RegionSlice(self, 0, self.num_bytes)


@dataclass(frozen=True, slots=True)
class RegionSlice:
    """Bytes `offset <= i < offset + num_bytes` of a region; raises CallerError unless they lie inside it."""

    region: Region
    offset: int
    num_bytes: int

    def __post_init__(self) -> None:
        if self.num_bytes < 1 or self.offset < 0 or self.offset + self.num_bytes > self.region.num_bytes:
            raise CallerError(
                f"a slice leaves its region: slice=[{self.offset}, {self.offset + self.num_bytes}), "
                f"region=[0, {self.region.num_bytes})"
            )

    @property
    def address(self) -> int:
        """Where the first byte lies."""
        return self.region.address + self.offset

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes themselves, uint8 [num_bytes]; a view."""
        return self.region.memory.narrow(0, self.offset, self.num_bytes)

    @property
    def remote(self) -> RemoteSlice:
        """The same bytes, as a peer must name them."""
        return RemoteSlice(
            address=self.address,
            num_bytes=self.num_bytes,
            kind=self.region.kind,
            device_id=self.region.device_id,
        )


def host_region(num_bytes: int, *, pinned: bool | None = None) -> Region:
    """A zeroed region of host memory that starts on a page; pinned if CUDA is there, unless told."""
    _check_size(num_bytes)
    pin = torch.cuda.is_available() if pinned is None else pinned
    padded = torch.zeros(num_bytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=pin)
    memory = padded.narrow(0, -padded.data_ptr() % PAGE_BYTES, num_bytes)
    return Region(memory.data_ptr(), num_bytes, "host", 0, memory)


def device_region(num_bytes: int, device: torch.device) -> Region:
    """A zeroed region of a CUDA device's memory; the zeroes are in place when this returns.

    The memory is of torch's caching allocator: an engine that runs with expandable segments must register it with a
    transport that can map those.
    """
    _check_size(num_bytes)
    if device.type != "cuda":
        raise CallerError(f"a device region needs a CUDA device: device={str(device)!r}")
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(memory.device)
    return Region(memory.data_ptr(), num_bytes, "device", memory.device.index, memory)


def storage_region(tensor: torch.Tensor) -> Region:
    """The whole allocation that a tensor is a view of, as it is."""
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    on_device = tensor.device.type == "cuda"
    device_id = tensor.device.index if on_device else 0
    return Region(storage.data_ptr(), storage.nbytes(), "device" if on_device else "host", device_id, memory)


def _check_size(num_bytes: int) -> None:
    if num_bytes < 1:
        raise CallerError(f"a region holds at least one byte: num_bytes={num_bytes}")
