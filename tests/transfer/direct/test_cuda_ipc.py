"""Cards and mappings of the CUDA path, over a driver that is played: its handles name memory of this very process."""

from dataclasses import replace

import msgspec
import pytest
import torch

from kv_core.errors import FerryError
from kv_core.spans import Span
from kv_kernels import reference
from kv_testing.tagged import make_caches
from kv_testing.worlds import state_of
from kv_transfer.agent.cards import DirectCard
from kv_transfer.direct import cuda_ipc
from kv_transfer.direct.base import CannotMap, Read
from kv_transfer.host import host_id
from kv_transfer.plan.part import Part


class Driver:
    """Allocations are the storages of tensors; a mapping is the memory itself."""

    def __init__(self, monkeypatch):
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.planes: dict[int, torch.Tensor] = {}
        self.closed: list[int] = []
        monkeypatch.setattr(cuda_ipc, "_range_of", self.range_of)
        monkeypatch.setattr(cuda_ipc, "_export", lambda base: base.to_bytes(cuda_ipc.HANDLE_BYTES, "little"))
        monkeypatch.setattr(cuda_ipc, "_open", self.open)
        monkeypatch.setattr(cuda_ipc, "_close_all", self.closed.extend)
        monkeypatch.setattr(cuda_ipc, "_enter", lambda device: None)
        monkeypatch.setattr(cuda_ipc, "peer_copy", self.peer_copy)

    def know(self, caches):
        for plane in caches.planes:
            self.storages[plane.untyped_storage().data_ptr()] = plane.untyped_storage()
            self.planes[plane.data_ptr()] = plane

    def range_of(self, address):
        for base, storage in self.storages.items():
            if base <= address < base + storage.nbytes():
                return base, storage.nbytes()
        raise cuda_ipc.DriverError(f"no allocation holds {address}")

    def open(self, handle):
        base = int.from_bytes(handle, "little")
        if base not in self.storages:
            raise cuda_ipc.DriverError("cuIpcOpenMemHandle_v2 failed: CUresult=201")
        return base

    def peer_copy(self, ours, ids, theirs, their_ids, **window):
        planes, source = ([self.planes[address] for address in side.addresses] for side in (ours, theirs))
        assert [tuple(plane.shape) for plane in source] == [theirs.shape] * len(source)
        reference.copy_blocks(planes, ids, source, their_ids, **window)


@pytest.fixture
def driver(monkeypatch):
    return Driver(monkeypatch)


def caches_of(driver, form):
    state = state_of()
    caches = make_caches(state, state.share_of(0), 6, form)
    driver.know(caches)
    return state, caches


FORMS = ["CBHTD", "BCHTD", "BHT(CD)", "split BHTD", "BH(CDT) BH(CTD)"]


@pytest.mark.parametrize("form", FORMS)
def test_a_mapping_reads_what_the_owner_keeps(driver, form):
    state, theirs = caches_of(driver, form)
    _, ours = caches_of(driver, "BCHTD")
    for number, plane in enumerate(theirs.planes):
        plane.copy_(torch.arange(plane.numel()).reshape(plane.shape) + 1000 * number)
    mapping = cuda_ipc.CudaDoor(ours, None).map(card_of(theirs), state, 0)
    for _ in range(2):
        mapping.read(Read(Span(1, 3), 2, Part((4, 1), 2, 5, 1), Part((0, 5), 2, 5, 2)), ours)
    for layer in (1, 2):
        for kind in (0, 1):
            taken, given = ours.planes[2 * layer + kind], theirs.planes[2 * layer + kind]
            assert torch.equal(taken[0, 2:, 2:], given[4, 2:, 1:3])
            assert torch.equal(taken[5, :3, 2:], given[1, :3, 1:3])
    mapping.close()
    mapping.close()
    assert len(driver.closed) == len({plane.untyped_storage().data_ptr() for plane in theirs.planes})


def card_of(caches, **changes):
    blob = msgspec.structs.replace(cuda_ipc._blob_of(caches), **changes)
    return DirectCard(kind=cuda_ipc.KIND, host=host_id(), blob=msgspec.msgpack.encode(blob))


def test_a_card_of_this_host_is_worth_trying(driver):
    _, caches = caches_of(driver, "CBHTD")
    door, card = cuda_ipc.CudaDoor(caches, None), card_of(caches)
    assert door.card() is None
    assert door.can_map(card)
    assert not door.can_map(msgspec.structs.replace(card, host="another"))
    assert not door.can_map(msgspec.structs.replace(card, kind="in-process"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"shape": (6, 8, 4, 4)}, "caches are not as stated: caches=(8, 4, 4, 'float32')"),
        ({"shape": (6, 4, 3, 4)}, "caches are not as stated"),
        ({"dtype": "float64"}, "caches are not as stated"),
        ({"first_layer": 1}, "caches are not as stated"),
        ({"groups": (0, 1)}, "caches are not as stated"),
        ({"shape": (7, 4, 4, 4)}, "a plane leaves its memory"),
        ({"strides": ((1 << 30, 4, 16, 1), (64, 4, 16, 1))}, "a plane leaves its memory"),
        ({"handles": (b"\1" * 64,)}, "CUresult=201"),
    ],
)
def test_a_card_that_lies_maps_nothing(driver, changes, why):
    """The kernel reads wherever it is told to: what a peer says must lie in what it has."""
    state, caches = caches_of(driver, "CBHTD")
    with pytest.raises(CannotMap) as caught:
        cuda_ipc.CudaDoor(caches, None).map(card_of(caches, **changes), state, 0)
    assert why in str(caught.value)
    assert len(driver.closed) in (0, 4), "what was opened is closed"


def test_planes_of_no_allocation_are_refused(driver):
    state, caches = caches_of(driver, "CBHTD")
    blob = cuda_ipc._blob_of(caches)
    planes = ((len(blob.handles), 0), *blob.planes[1:])
    with pytest.raises(CannotMap, match="a plane leaves its memory: plane=0, .* held=0"):
        cuda_ipc.CudaDoor(caches, None).map(card_of(caches, planes=planes), state, 0)


@pytest.mark.parametrize("blob", [b"", b"\xc1", b"\x80", b"\x81\xa7handles\x90"])
def test_garbage_maps_nothing(driver, blob):
    state, caches = caches_of(driver, "CBHTD")
    card = DirectCard(kind=cuda_ipc.KIND, host="h", blob=blob)
    with pytest.raises(CannotMap, match="the card cannot be read"):
        cuda_ipc.CudaDoor(caches, None).map(card, state, 0)


def test_caches_in_host_memory_have_no_door(driver):
    _, caches = caches_of(driver, "CBHTD")
    assert cuda_ipc.cuda_door(caches) is None
    assert cuda_ipc.cuda_door(replace(caches, planes=())) is None


def test_a_driver_that_is_not_there_is_an_error_of_the_driver(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "LIBRARY", "libno-such-driver.so")
    with pytest.raises(FerryError, match="the CUDA driver has no cuIpcGetMemHandle"):
        cuda_ipc._export(1 << 40)
