"""The direct path between processes of one host: caches mapped through CUDA IPC handles, read by one kernel.

In:  a rank's PagedCaches on a GPU; the DirectCard of a peer.
Out: `cuda_door`; RemoteCaches over mapped memory.
Law: as `direct.base`. The only module that calls the CUDA driver. What the driver refuses (another host or container,
     memory it cannot export, GPUs without peer access) is a CannotMap, or no card at all, and never an error of a load.

Each process may see its own GPU only: handles carry the device. Memory of PyTorch's expandable segments has no handle.
"""

import ctypes
import logging
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import torch

from kv_core.errors import FerryError
from kv_core.ids import Rank
from kv_core.spans import Span
from kv_kernels.layout import MappedPlanes
from kv_kernels.peer import peer_copy
from kv_transfer.agent.cards import DirectCard
from kv_transfer.direct.base import CannotMap, Read
from kv_transfer.direct.book import CELL_BYTES, NUM_CELLS, Book, BookReader
from kv_transfer.direct.laid import MAX_PLANES, Address, Index, LaidPlanes, check_laid, laid
from kv_transfer.direct.pages import MappedPages, PagesCard, SharedPages
from kv_transfer.host import host_id
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.plan.elements import ITEM_BYTES
from kv_transfer.pools import PagedCaches

logger = logging.getLogger(__name__)

KIND: Final = "cuda-ipc"
HANDLE_BYTES: Final = 64
LAZY_PEER_ACCESS: Final = 1
LIBRARY: Final = "libcuda.so.1"


class _Blob(LaidPlanes, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to map one rank's caches: handles of its allocations, and where in them each plane begins."""

    handles: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)], ...],
        msgspec.Meta(min_length=1, max_length=1 << 14),
    ]
    planes: Annotated[tuple[tuple[Index, Address], ...], msgspec.Meta(min_length=1, max_length=MAX_PLANES)]
    book: PagesCard | None = None


class DriverError(FerryError):
    """The CUDA driver refused a call."""


class CudaDoor:
    """A `DirectDoor` of one rank's caches."""

    def __init__(self, caches: PagedCaches, card: DirectCard | None, pages: SharedPages | None = None) -> None:
        self._device = caches.planes[0].device
        self._card = card
        self._pages = pages
        self.book = None if pages is None else Book(pages.memory)

    def card(self) -> DirectCard | None:
        return self._card

    def can_map(self, card: DirectCard) -> bool:
        return (card.kind, card.host) == (KIND, host_id())

    def map(self, card: DirectCard, state: CacheState, rank: Rank) -> "CudaCaches":
        try:
            blob = msgspec.msgpack.decode(card.blob, type=_Blob)
        except msgspec.DecodeError as error:
            raise CannotMap(f"the card cannot be read: {error}") from error
        check_laid(blob, len(blob.planes), state, rank)
        _enter(self._device)
        mapped: list[int] = []
        try:
            mapped.extend(map(_open, blob.handles))
            _check_reach(blob, [_range_of(address)[1] for address in mapped])
        except FerryError as error:
            _close_all(mapped)
            raise CannotMap(str(error)) from error
        return CudaCaches(blob, mapped, _mapped_book(blob.book))

    def close(self) -> None:
        if self.book is not None and self._pages is not None:
            self.book.close()
            self._pages.close()


class CudaCaches:
    """`RemoteCaches` in the memory of another process."""

    def __init__(self, blob: _Blob, mapped: list[int], pages: MappedPages | None = None) -> None:
        self._blob = blob
        self._pages = pages
        self.book = None if pages is None else BookReader(pages.memory)
        self._mapped = mapped
        self._addresses = tuple(mapped[index] + offset for index, offset in blob.planes)
        self._dtype: torch.dtype = getattr(torch, blob.dtype)
        self._pairs_of: dict[Span, tuple[tuple[MappedPlanes, MappedPlanes], ...]] = {}

    @property
    def groups(self) -> tuple[int, ...]:
        return self._blob.groups

    def read(self, what: Read, into: PagedCaches) -> None:
        assert self._mapped, "law: what is closed is not read"
        for ours, theirs in self._pairs(what.layers, into):
            peer_copy(ours, what.target.block_ids, theirs, what.source.block_ids, **what.extent)

    def _pairs(self, layers: Span, into: PagedCaches) -> tuple[tuple[MappedPlanes, MappedPlanes], ...]:
        """(ours, theirs) of each copy: one, or one per kind if K and V differ in strides on a side.

        Kept: checking and listing 64 planes takes longer than the copy of a short prompt.
        """
        if layers not in self._pairs_of:
            ours, num_kinds = into.planes_of_layers(layers), len(self._blob.strides)
            is_one = len(set(self._blob.strides)) == 1 and len({plane.stride() for plane in ours}) == 1
            parts = (
                [(slice(None), 0)] if is_one else [(slice(kind, None, num_kinds), kind) for kind in range(num_kinds)]
            )
            self._pairs_of[layers] = tuple(
                (MappedPlanes.of(ours[part]), self._planes(layers, part, kind)) for part, kind in parts
            )
        return self._pairs_of[layers]

    def close(self) -> None:
        mapped, self._mapped = self._mapped, []
        _close_all(mapped)
        pages, self._pages, self.book = self._pages, None, None
        if pages is not None:
            pages.close()

    def _planes(self, layers: Span, which: slice, kind: int) -> MappedPlanes:
        num_kinds, first = len(self._blob.strides), self._blob.first_layer
        addresses = self._addresses[(layers.start - first) * num_kinds : (layers.stop - first) * num_kinds]
        return MappedPlanes(addresses[which], self._blob.shape, self._blob.strides[kind], self._dtype)


def cuda_door(caches: PagedCaches) -> CudaDoor | None:
    """The door of caches on a GPU; None for others. Caches that cannot be exported have a door without a card."""
    if not caches.planes or not caches.planes[0].is_cuda:
        return None
    try:
        blob = _blob_of(caches)
    except DriverError as error:
        logger.info("peers cannot map our caches, their bytes are staged: %s", error)
        return CudaDoor(caches, None)
    pages = _pages_for_book()
    blob = msgspec.structs.replace(blob, book=None if pages is None else pages.card)
    return CudaDoor(caches, DirectCard(kind=KIND, host=host_id(), blob=msgspec.msgpack.encode(blob)), pages)


def _pages_for_book() -> SharedPages | None:
    try:
        return SharedPages(NUM_CELLS * CELL_BYTES)
    except OSError as error:
        logger.info("peers cannot see what we offer, they ask for it: %s", error)
        return None


def _mapped_book(card: PagesCard | None) -> MappedPages | None:
    """None if there is none, or it cannot be seen from here: then each read is asked for."""
    try:
        return None if card is None else MappedPages(card)
    except CannotMap as error:
        logger.info("what a peer offers cannot be seen, it is asked for: %s", error)
        return None


def _check_reach(blob: _Blob, sizes: Sequence[int]) -> None:
    """CannotMap if a plane reaches beyond its allocation: the kernel reads wherever it is told to."""
    itemsize = ITEM_BYTES[blob.dtype]
    for number, (index, offset) in enumerate(blob.planes):
        strides = blob.strides[number % len(blob.strides)]
        reach = 1 + sum((length - 1) * stride for length, stride in zip(blob.shape, strides, strict=True))
        if index >= len(sizes) or offset + reach * itemsize > sizes[index]:
            held = sizes[index] if index < len(sizes) else 0
            raise CannotMap(f"a plane leaves its memory: plane={number}, end={offset + reach * itemsize}, held={held}")


def _blob_of(caches: PagedCaches) -> _Blob:
    handles: dict[int, bytes] = {}
    planes: list[tuple[int, int]] = []
    for plane in caches.planes:
        base, _ = _range_of(plane.data_ptr())
        if base not in handles:
            handles[base] = _export(base)
        planes.append((list(handles).index(base), plane.data_ptr() - base))
    return _Blob(handles=tuple(handles.values()), planes=tuple(planes), **laid(caches))


def _enter(device: torch.device) -> None:
    """Gives this thread the context of the device, which the driver's calls need."""
    torch.cuda.current_stream(device).query()


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


def _range_of(address: int) -> tuple[int, int]:
    """(where the allocation of this address begins, its bytes)."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return base.value, size.value


def _export(base: int) -> bytes:
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
    return bytes(handle)


def _open(handle: bytes) -> int:
    address = ctypes.c_uint64()
    _call(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(address),
        _Handle.from_buffer_copy(handle),
        ctypes.c_uint(LAZY_PEER_ACCESS),
    )
    return address.value


def _close_all(mapped: Sequence[int]) -> None:
    for address in mapped:
        try:
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        except DriverError:
            logger.exception("a mapping did not close")


def _call(name: str, *arguments: Any) -> None:
    try:
        result = getattr(ctypes.CDLL(LIBRARY), name)(*arguments)
    except (OSError, AttributeError) as error:
        raise DriverError(f"the CUDA driver has no {name}: {error}") from error
    if result:
        raise DriverError(f"{name} failed: CUresult={result}")
