"""NIXL itself, as vLLM's NIXL connector uses it: one READ with a descriptor for each block of each plane.

In:  planes of blocks that lie in a row; the same of a peer.
Out: the peer's blocks in ours.
Law: the lists of all blocks are prepared before; what is timed picks from them, posts and waits.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of each plane begin: address + number * block_bytes; `device_id` is None for host memory."""

    addresses: Sequence[int]
    block_bytes: int
    num_blocks: int
    device_id: int | None = None


class Plain:
    """One agent."""

    def __init__(self, name: str, blocks: Blocks) -> None:
        from nixl import _bindings as nixl

        settings = nixl.nixlAgentConfig()
        settings.useProgThread, settings.useListenThread, settings.pthrDelay = True, False, 1000
        settings.syncMode, settings.captureTelemetry = nixl.NIXL_THREAD_SYNC_NONE, False
        self._nixl, self._agent, self._blocks = nixl, nixl.nixlAgent(name, settings), blocks
        self._segment = nixl.DRAM_SEG if blocks.device_id is None else nixl.VRAM_SEG
        self._agent.createBackend("UCX", {})
        size = blocks.block_bytes * blocks.num_blocks
        regions = [(address, size, blocks.device_id or 0, "") for address in blocks.addresses]
        self._agent.registerMem(nixl.nixlRegDList(self._segment, regions), [])

    def card(self) -> tuple[bytes, Blocks]:
        return bytes(self._agent.getLocalMD()), self._blocks

    def meet(self, name: str, blob: bytes, theirs: Blocks) -> None:
        self._agent.loadRemoteMD(blob)
        self._num_theirs = theirs.num_blocks
        self._ours = self._agent.prepXferDlist(self._nixl.NIXL_INIT_AGENT, self._list(self._blocks))
        self._theirs = self._agent.prepXferDlist(name, self._list(theirs))

    def read(self, our_blocks: Sequence[int], their_blocks: Sequence[int]) -> None:
        """These blocks of every plane, from theirs to ours; AssertionError if NIXL refuses."""
        import numpy as np

        planes = np.arange(len(self._blocks.addresses))[:, None]
        to = (planes * self._blocks.num_blocks + np.array(our_blocks)).ravel().astype(np.int32)
        of = (planes * self._num_theirs + np.array(their_blocks)).ravel().astype(np.int32)
        handle = self._agent.makeXferReq(self._nixl.NIXL_READ, self._ours, to, self._theirs, of, b"", [], False)
        status = self._agent.postXferReq(handle, b"")
        while status == self._nixl.NIXL_IN_PROG:
            time.sleep(0.0005)
            status = self._agent.getXferStatus(handle)
        assert status == self._nixl.NIXL_SUCCESS, status
        self._agent.releaseXferReq(handle)

    def _list(self, blocks: Blocks) -> Any:
        import numpy as np

        planes = np.array(blocks.addresses, dtype=np.uint64)[:, None]
        starts = (planes + np.arange(blocks.num_blocks, dtype=np.uint64) * blocks.block_bytes).ravel()
        sizes, devices = np.full_like(starts, blocks.block_bytes), np.full_like(starts, blocks.device_id or 0)
        return self._nixl.nixlXferDList(self._segment, np.stack([starts, sizes, devices], axis=1))


def plain_of(name: str, ranks: Any) -> Plain:
    """Over the blocks of the first of these ranks (`kv_engine_adapter.cli.bench_pair`)."""
    planes = ranks.planes[0]
    num_blocks, tokens, heads, size = planes[0].shape
    device_id = None if ranks.device == "cpu" else 0
    addresses = [plane.data_ptr() for plane in planes]
    return Plain(name, Blocks(addresses, tokens * heads * size * 2, num_blocks, device_id))
