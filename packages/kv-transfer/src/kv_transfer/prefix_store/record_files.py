"""One record's bytes on their way between memory and a file.

In:  a Header (but for the checksum), the name, the payload.
Out: a published file; or the payload of one, verified.
Law: a payload that is returned has the length, the identity and the checksum that its header says, and the header is
     the one that was asked for. Anything else is Missed or OSError.
"""

import os
from dataclasses import replace

import torch
from torch import Tensor

from kv_transfer.file_mover import FileMover
from kv_transfer.prefix_store.header import HEADER_BYTES, Header, checksum_in
from kv_transfer.prefix_store.misses import Miss, Missed
from kv_transfer.prefix_store.names import RecordName
from kv_transfer.prefix_store.shelf import Shelf
from kv_transfer.slot_files import Sums


class RecordFiles:
    """The files of one namespace; may be used by several threads. `mover` begins where the file stands."""

    def __init__(self, shelf: Shelf, mover: FileMover) -> None:
        self._shelf = shelf
        self._mover = mover
        self._sums = Sums()

    def write(self, header: Header, name: RecordName, payload: Tensor) -> None:
        """`payload` is uint8 [n] in host memory."""
        assert payload.numel() == header.payload_bytes, "law: a header tells the length of its payload"
        packed = replace(header, checksum=self._sums.of(payload)).packed()

        def fill(file: int) -> None:
            self._mover.write(file, torch.frombuffer(bytearray(packed), dtype=torch.uint8))
            self._mover.write(file, payload)

        self._shelf.publish(header.key, name, header.file_bytes, fill)

    def read(self, header: Header, name: RecordName) -> Tensor:
        """The payload, uint8 [n] in host memory."""
        with self._shelf.opened(header.key, name, header.file_bytes) as file:
            checksum = checksum_in(os.read(file, HEADER_BYTES), header)
            payload = torch.empty(header.payload_bytes, dtype=torch.uint8)
            self._mover.read(file, payload)
        if self._sums.of(payload) != checksum:
            raise Missed(Miss.CORRUPT)
        self._shelf.touch(header.key, name)
        return payload
