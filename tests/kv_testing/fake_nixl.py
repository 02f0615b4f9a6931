"""What `nixl_files` uses of NIXL's bindings, without the library: a movement ends when a test lets it.

In:  `monkeypatch` puts a FakeNixl in the place of the bindings.
Out: what is registered and open; movements that hang.
Law: a movement that ends late moves its bytes late, into whatever memory and file it was given.
"""

import ctypes
import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass
class Movement:
    """One transfer request; the bytes move when it ends."""

    operation: str
    address: int
    at: int
    length: int
    file: int
    is_over: bool = False

    def move(self) -> None:
        buffer = (ctypes.c_char * self.length).from_address(self.address)
        if self.operation == "read":
            moved = os.preadv(self.file, [buffer], self.at)
        else:
            moved = os.pwrite(self.file, bytes(buffer), self.at)
        assert moved == self.length, "the file and the memory are still there"
        self.is_over = True


@dataclass
class FakeNixl:
    """The bindings, and the one agent they make. `hangs`: movements that are posted do not end until `go_on`."""

    hangs: bool = False
    registered: list[tuple[str, int]] = field(default_factory=list)
    open: list[Movement] = field(default_factory=list)

    NIXL_READ, NIXL_WRITE = "read", "write"
    NIXL_IN_PROG, NIXL_SUCCESS = "in progress", "done"
    FILE_SEG, DRAM_SEG, VRAM_SEG = "file", "host", "device"
    NIXL_THREAD_SYNC_NONE = "none"
    nixlAgentConfig = SimpleNamespace  # noqa: N815

    def nixlAgent(self, name: str, settings: Any) -> "FakeNixl":  # noqa: N802
        return self

    def createBackend(self, name: str, params: dict[str, str]) -> str:  # noqa: N802
        return name

    def nixlRegDList(self, kind: str, segments: list[tuple[int, int, int, str]]) -> list[tuple[str, int]]:  # noqa: N802
        return [(kind, device if kind == "file" else address) for address, _, device, _ in segments]

    def nixlXferDList(self, kind: str, segments: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:  # noqa: N802
        return segments

    def registerMem(self, what: list[tuple[str, int]], backends: list[str]) -> None:  # noqa: N802
        self.registered += what

    def deregisterMem(self, what: list[tuple[str, int]], backends: list[str]) -> None:  # noqa: N802
        for each in what:
            self.registered.remove(each)

    def createXferReq(self, operation: str, ours: Any, theirs: Any, *rest: Any) -> Movement:  # noqa: N802
        ((address, length, _),), ((at, _, file),) = ours, theirs
        self.open.append(Movement(operation, address, at, length, file))
        return self.open[-1]

    def postXferReq(self, movement: Movement, notification: bytes) -> str:  # noqa: N802
        if not self.hangs:
            movement.move()
        return self.getXferStatus(movement)

    def getXferStatus(self, movement: Movement) -> str:  # noqa: N802
        return self.NIXL_SUCCESS if movement.is_over else self.NIXL_IN_PROG

    def releaseXferReq(self, movement: Movement) -> None:  # noqa: N802
        assert movement.is_over, "law: a request is released when it is over"
        self.open.remove(movement)

    def go_on(self) -> None:
        """What hangs ends now, and nothing hangs any more."""
        self.hangs = False
        for movement in self.open:
            movement.move()
