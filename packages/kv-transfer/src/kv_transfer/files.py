"""Which way the bytes of the disk tier move, chosen when the pools are made.

In:  FilesConfig, the directory of the disk tier, the device of the pools.
Out: a `FileMover`; one of NIXL has been seen to write and read a file there.
Law: what does not work here (no NIXL, no such plugin, no GPU, a file system that refuses) is refused at the start with
     its reason in the log, and plain files take its place.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from kv_core.errors import FerryError
from kv_transfer.agent.nixl_files import NixlFiles
from kv_transfer.config import ConfigError
from kv_transfer.file_mover import FILE_LIMIT_S, FileMover, PlainFiles
from kv_transfer.file_threads import FileThreads
from kv_transfer.process_directory import ProcessDirectory
from kv_transfer.slot_files import SlotFiles

_log = logging.getLogger(__name__)

Way = Literal["plain", "posix", "gds"]
WAYS: Final[tuple[Way, ...]] = ("plain", "posix", "gds")

MAX_LIMIT_S: Final = 3600.0
_PROBE_BYTES: Final = 3 * 4096 + 8
"""More than a page and not a multiple of one, as slots are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesConfig:
    """How slots are kept in files."""

    way: Way = "plain"
    """`plain` calls, NIXL's `posix`, or NIXL's `gds` (from GPU memory to a file, not through the host). Why plain: as
    measured POSIX is no faster (docs/tuning.md), and for GDS there was no driver and no file system to measure on."""
    checksum: bool = True
    """Compare what is read with what was written; a difference is a miss."""
    limit_s: float = FILE_LIMIT_S
    """How long a slot may take; a file system that takes longer hangs, which is a miss."""

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ConfigError(f"way is unknown: got={self.way!r}, allowed={', '.join(WAYS)}")
        if not 0 < self.limit_s <= MAX_LIMIT_S:
            raise ConfigError(f"limit_s is out of range: got={self.limit_s}, most={MAX_LIMIT_S}")


class FilesRefused(FerryError):
    """A way to move files does not work here; says why."""


def open_mover(config: FilesConfig, directory: Path, device: torch.device) -> FileMover:
    """The way that is configured if it works here, else plain files; `BlockPools` closes it.

    OSError if the directory cannot be made.
    """
    threads = FileThreads(config.limit_s)
    try:
        threads.call(f"making {directory}", lambda: directory.mkdir(parents=True, exist_ok=True))
        if config.way != "plain":
            return _probed(_nixl_mover(config, device), directory, device, threads)
    except FilesRefused as refusal:
        _log.warning("files: %s is refused, plain files take its place: %s", config.way, refusal)
    finally:
        threads.close()
    return PlainFiles()


def _nixl_mover(config: FilesConfig, device: torch.device) -> FileMover:
    if config.way == "gds" and device.type != "cuda":
        raise FilesRefused(f"GDS moves memory of a GPU: pools are on {device}")
    try:
        return NixlFiles("GDS" if config.way == "gds" else "POSIX", config.limit_s)
    except FerryError as error:
        raise FilesRefused(str(error)) from error


def _probed(mover: FileMover, directory: Path, device: torch.device, threads: FileThreads) -> FileMover:
    """The mover, after one slot went out and came back as slots will; else it is closed and refused."""
    memory = device if mover.reaches(device) else torch.device("cpu")
    content = torch.arange(_PROBE_BYTES, device=memory).to(torch.uint8)
    if memory.type == "cuda":
        torch.cuda.synchronize(memory)
    try:
        reason = _reason_against(mover, directory, content, threads)
    except OSError as error:
        reason = str(error)
    if reason is not None:
        mover.close()
        raise FilesRefused(f"{mover.name} does not work in {directory}: {reason}")
    return mover


def _reason_against(mover: FileMover, directory: Path, content: Tensor, threads: FileThreads) -> str | None:
    """None if a slot comes back as it went out."""
    root = threads.call(f"using {directory}", lambda: ProcessDirectory(directory))
    try:
        files = SlotFiles(root, 0, 0, _PROBE_BYTES, mover, threads=threads)
        files.write(0, content)
        is_equal = torch.equal(content, files.load(0, content.device))
    finally:
        threads.call(f"removing {root.path}", root.close)
    return None if is_equal else "it reads other bytes than it wrote"
