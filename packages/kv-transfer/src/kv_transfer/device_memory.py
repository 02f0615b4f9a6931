"""How much memory a device has left, and how to give it back.

In:  a device.
Out: bytes that could be allocated now; memory that torch keeps for later, given back to the device.
Law: memory that torch's allocator has taken from the device and lent to nobody is free (core spec 11.1). A number that
     cannot be true is an error, not a guess.

What `free_bytes` says goes into `kv_core.sizing.memory_budget`.
"""

import gc
import os

import torch

from kv_core.errors import FerryError


class MemoryUnknown(FerryError):
    """A device says that more is free than it has."""


def free_bytes(device: torch.device) -> int:
    """Bytes of the device that could be allocated once its queued work has ended; of the host for a CPU."""
    if device.type != "cuda":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if not 0 <= free + kept <= total:
        raise MemoryUnknown(f"{device} has more free than it has: free={free}, kept by torch={kept}, total={total}")
    return free + kept


def trim(device: torch.device) -> None:
    """Give the device what torch's allocator keeps for later; nothing to do for a CPU."""
    if device.type == "cuda":
        gc.collect()  # planes and pools that only refer to each other hold their memory until then
        torch.cuda.empty_cache()
