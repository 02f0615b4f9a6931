"""Memory of the blocks that kv_core's manager owns: on the device, in host memory, in files.

In:  the shapes of the pools (`kv_core.layout`), the manager's windows with their blocks in each tier, a device and a
     directory.
Out: BlockPools: for each window its pools, each with a tensor or files for every tier.
Law: one slot number means the same block in every pool of its window and tier. Only copies and the model write slots.

A module of its own beside `pools`: there an engine owns tensors and block ids and we only view one tier of them, plane
by plane, for the formatter; here kv_core owns the blocks, a block spans several pools, and there are tiers.

Legend: B slots, L layers of the pool, C planes (keys, values), H heads, T tokens per block, D stored head size.

    pool     [B, L, C, H, T, D], contiguous: a slot is one run of memory, and so is its file
    plane    [B, T, H, D], a view, as models and `pools.PagedCaches` want it
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kv_core.config import WindowConfig
from kv_core.errors import CallerError
from kv_core.layout import PoolKind, PoolPosition, PoolShape, layer_positions
from kv_core.tiers import Tier
from kv_transfer.device_memory import trim
from kv_transfer.file_mover import FILE_LIMIT_S, FileMover, PlainFiles
from kv_transfer.file_threads import FileThreads
from kv_transfer.process_directory import ProcessDirectory
from kv_transfer.slot_files import SlotFiles, Sums

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool in all tiers; tiers without slots are None."""

    shape: PoolShape
    device: Tensor
    host: Tensor | None
    files: SlotFiles | None

    def tensor(self, tier: Tier) -> Tensor:
        """The slots of a tier that lies in memory, [B, L, C, H, T, D]."""
        found = {Tier.DEVICE: self.device, Tier.HOST: self.host}.get(tier)
        if found is None:
            raise CallerError(f"the pool has no slots there: tier={tier.name}, window={self.shape.window}")
        return found

    @property
    def disk(self) -> SlotFiles:
        """The slots of the disk tier."""
        if self.files is None:
            raise CallerError(f"the pool has no slots there: tier={Tier.DISK.name}, window={self.shape.window}")
        return self.files


@dataclass(frozen=True, slots=True)
class WindowPools:
    """All pools of one window, in absolute order."""

    config: WindowConfig
    pools: tuple[Pool, ...]

    @property
    def copies_whole(self) -> bool:
        """Whether only whole slots may be copied: scales of 4-bit elements are packed across tokens."""
        return any(pool.shape.kind is PoolKind.BLOCK_SCALE for pool in self.pools)


class BlockPools:
    """The memory of one manager. `close` removes the files; tensors live as long as somebody holds them."""

    def __init__(
        self,
        shapes: Sequence[PoolShape],
        windows: Sequence[WindowConfig],
        *,
        device: torch.device,
        directory: Path | None = None,
        mover: FileMover | None = None,
        checksum: bool = True,
        file_limit_s: float = FILE_LIMIT_S,
    ) -> None:
        """`windows` are those of the manager's configuration; layers that read more than the largest belong to it.

        `directory` holds the disk tier, if a window has one; `mover` moves its bytes (`files.open_mover`; plain files
        if None) and is closed with the pools. With `checksum` a file whose bytes have changed is a file that fails; so
        is one that takes longer than `file_limit_s`. All memory is zeroed. OSError if the directory cannot be used.
        """
        self.device = device
        self._threads = FileThreads(file_limit_s)
        self._root = self._threads.call(f"making {directory}", lambda: _root(windows, directory))
        self._is_closed = False
        self._mover = mover or PlainFiles()
        self._sums = Sums() if checksum else None
        self._positions = {kind: layer_positions(shapes, kind) for kind in PoolKind}
        self.pools = tuple(self._make(number, shape, windows) for number, shape in enumerate(shapes))
        self.windows = {
            config.window: WindowPools(
                config, tuple(pool for pool in self.pools if _home(pool.shape, windows) == config)
            )
            for config in windows
        }
        if idle := [window for window, pools in self.windows.items() if not pools.pools]:
            raise CallerError(f"every window has layers: shapes={[shape.window for shape in shapes]}, without={idle}")

    @property
    def directory(self) -> Path | None:
        """Where the files are, below the directory that was given."""
        return self._root.path if self._root else None

    def position(self, layer: int, kind: PoolKind = PoolKind.KV) -> PoolPosition:
        """The pool of a layer's keys and values (or scales, or index keys), and which of its layers this is.

        CallerError if there is none of this kind.
        """
        if not self._positions[kind]:
            raise CallerError(
                f"no such pools: kind={kind.value}, ours={[pool.shape.kind.value for pool in self.pools]}"
            )
        return self._positions[kind][layer]

    @property
    def num_layers(self) -> int:
        return len(self._positions[PoolKind.KV])

    def window_of(self, layer: int) -> int:
        """The manager's window whose slots index the planes of a layer."""
        return self.config_of(self.pools[self.position(layer).pool]).window

    def config_of(self, pool: Pool) -> WindowConfig:
        """The manager's window that a pool belongs to."""
        return next(found.config for found in self.windows.values() if pool in found.pools)

    def planes(self, layer: int, kind: PoolKind = PoolKind.KV) -> tuple[Tensor, ...]:
        """The planes of a layer on the device, each [B, T, H, D]; views of the pool."""
        number, ordinal = self.position(layer, kind)
        return tuple(plane.transpose(1, 2) for plane in self.pools[number].device[:, ordinal].unbind(1))

    def close(self) -> None:
        """Remove the files of the disk tier, forget the tensors, and give the device what nobody holds. Idempotent.

        Copies have ended before: `CopyEngine.close`. A file system that hangs is left behind after `file_limit_s`; what
        is left there goes when a next process starts beside it.
        """
        self._mover.close()
        if self._root and not self._is_closed:
            self._is_closed = True
            try:
                self._threads.call(f"removing {self._root.path}", self._root.close)
            except OSError as error:
                _log.warning("files: %s is left behind: %s", self._root.path, error)
            self._threads.close()
        self.pools, self.windows = (), {}
        trim(self.device)

    def _make(self, number: int, shape: PoolShape, windows: Sequence[WindowConfig]) -> Pool:
        config = _home(shape, windows)
        device = _tensor(shape, config.num_device, self.device)
        files = None
        if config.num_disk and self._root:
            num_bytes = shape.bytes_per_block
            files = SlotFiles(self._root, config.window, number, num_bytes, self._mover, self._sums, self._threads)
            self._keep(device)
        pinned = self.device.type == "cuda"
        host = _tensor(shape, config.num_host, torch.device("cpu"), pinned=pinned) if config.num_host else None
        return Pool(shape, device, host, files)

    def _keep(self, memory: Tensor) -> None:
        """Tell the mover that this memory stays. If it cannot keep it, it makes it known anew for each movement."""
        if self._mover.reaches(self.device):
            try:
                self._mover.keep(memory.view(-1).view(torch.uint8))
            except OSError as error:
                _log.warning("files: %s moves %s without keeping it: %s", self._mover.name, tuple(memory.shape), error)


def _root(windows: Sequence[WindowConfig], directory: Path | None) -> ProcessDirectory | None:
    if not any(config.num_disk for config in windows):
        return None
    if directory is None:
        raise CallerError(f"blocks on disk need a directory: windows={list(windows)}")
    return ProcessDirectory(directory)


def _home(shape: PoolShape, windows: Sequence[WindowConfig]) -> WindowConfig:
    """The manager's window of a pool: layers that read further than the largest one read all there is."""
    largest = windows[-1].window
    wanted = largest if shape.window is None else min(shape.window, largest)
    for config in windows:
        if config.window == wanted:
            return config
    raise CallerError(f"no window for a pool: ours={[config.window for config in windows]}, theirs={shape.window}")


def _tensor(shape: PoolShape, num_slots: int, device: torch.device, *, pinned: bool = False) -> Tensor:
    dtype: torch.dtype = getattr(torch, shape.dtype)
    flat = torch.zeros(shape.shape(num_slots), dtype=dtype, device=device, pin_memory=pinned)
    return flat.view(*flat.shape[:-1], shape.num_heads, shape.tokens_per_block, shape.head_size)
