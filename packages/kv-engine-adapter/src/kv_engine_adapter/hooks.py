"""Faults that a test orders in a running engine, by files in a directory (`test_hooks_dir`); never for production.

    corrupt.json   {"block": 2, "plane": 0}   flip the sign of every element of that block and plane (0 K, 1 V) in what
                                               is received, after it was verified and before it is scattered; with a
                                               "layer" of that layer of the model alone
    hold-writes    (any content)               hold the sender's writes that have passed all their checks, until the
                                               file is gone: a late writer
    lose.json      {"share": 0.3}              lose this share of the control messages that the engine's ranks say
    files.json     {"errno": 28}               let each write of the tiers to their disk fail so; with "read_errno" each
                                               read; with "hang_s" let each take so long first

Law: with an empty directory nothing differs from no directory at all.
"""

import json
import os
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kv_core.ids import SessionId
from kv_core.spans import Span
from kv_transfer.faults import ON_TIME, NoFaults
from kv_transfer.file_mover import FileCalls
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.protocol.messages import Message

if TYPE_CHECKING:
    import torch

    from kv_transfer.plan.plan import Chunk


class OrderedFaults(NoFaults):
    """Looks the directory up at each place where something may go wrong."""

    def __init__(self, directory: Path, state: CacheState) -> None:
        """`state` is our own; what is received is taken to be laid out in our own block order."""
        self._corrupt = directory / "corrupt.json"
        self._hold = directory / "hold-writes"
        self._lose = directory / "lose.json"
        self._dice = random.Random()
        self._state = state

    def after_verify(self, session: SessionId, chunk: "Chunk", received: "torch.Tensor") -> None:  # noqa: ARG002
        if not self._corrupt.exists():
            return
        order = json.loads(self._corrupt.read_text())
        state, per_block = self._state, self._state.tokens_per_block
        tokens = Span(order["block"] * per_block, (order["block"] + 1) * per_block) & chunk.tokens
        layers = chunk.piece.layers
        hit_layers = layers & Span(order["layer"], order["layer"] + 1) if "layer" in order else layers
        if tokens and hit_layers:
            first = hit_layers.start - layers.start
            planes = _chunk_planes(received, chunk, state)[first : first + len(hit_layers)]
            plane = planes[:, order["plane"]]
            axis = 1 if state.layout.order == "token_major" else 2
            hit = plane.narrow(axis, tokens.start - chunk.tokens.start, len(tokens))
            item_bytes = planes.shape[-1] // state.head_size
            hit[..., item_bytes - 1 :: item_bytes] ^= 0x80

    def before_write(self, session: SessionId, seq: int) -> bool:  # noqa: ARG002
        if not self._hold.exists():
            return False
        self._hold.with_name(f"held-{session}").touch()
        return True

    def outgoing(self, message: Message) -> Sequence[float]:  # noqa: ARG002
        if not self._lose.exists():
            return ON_TIME
        return () if self._dice.random() < json.loads(self._lose.read_text())["share"] else ON_TIME


def ordered_file_calls(directory: Path) -> FileCalls:
    """The calls of the tiers' disk, which look the directory up each time."""
    order, usual = directory / "files.json", FileCalls()

    def write(file: int, buffer: memoryview) -> int:
        _disturb(order, "errno")
        return usual.write(file, buffer)

    def read_into(file: int, buffer: memoryview) -> int:
        _disturb(order, "read_errno")
        return usual.read_into(file, buffer)

    return FileCalls(write, read_into)


def _disturb(order: Path, which: str) -> None:
    wanted = {}
    with suppress(FileNotFoundError):
        wanted = json.loads(order.read_text())
    time.sleep(wanted.get("hang_s", 0.0))
    if which in wanted:
        raise OSError(wanted[which], os.strerror(wanted[which]))


def _chunk_planes(received: "torch.Tensor", chunk: "Chunk", state: CacheState) -> "torch.Tensor":
    """The chunk's bytes as [layer, plane, token, head, byte] or [layer, plane, head, token, byte].

    They are of the sender's elements, so only the chunk tells how many there are for each.
    """
    inner = [len(chunk.tokens), len(chunk.piece.heads)]
    if state.layout.order == "head_major":
        inner.reverse()
    return received[: chunk.num_bytes].view(len(chunk.piece.layers), state.num_planes, *inner, -1)
