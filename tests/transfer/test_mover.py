"""The mover's thread, with a stream that only counts: what a job has queued ends before its end is told."""

import queue
from contextlib import nullcontext

import pytest
import torch

from kv_transfer.mover import Mover


class CountingStream:
    """Work that is queued, until somebody waits for it."""

    def __init__(self, is_broken=False):
        self.is_broken = is_broken
        self.num_queued = 0

    def synchronize(self):
        self.num_queued = 0
        if self.is_broken:
            raise RuntimeError("the device is lost")


class StreamMover(Mover):
    """A mover on a CPU that takes its stream from the test."""

    def __init__(self, stream, post):
        self._given = stream
        super().__init__(torch.device("cpu"), post)

    def _run(self):
        self._stream = self._given
        super()._run()

    def _on_stream(self):
        return nullcontext()


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_job_that_fails_half_way_is_told_only_when_its_copies_are_over(is_broken):
    """Whoever is told gives the blocks back to the engine: a copy still queued would write somebody else's."""
    stream, ends = CountingStream(is_broken), queue.SimpleQueue()
    mover = StreamMover(stream, lambda call: call())

    def half():
        stream.num_queued += 1
        raise ValueError("the second part does not fit")

    mover.submit(half, None, lambda moved: ends.put((moved, stream.num_queued)))
    moved, num_queued = ends.get(timeout=10)
    assert mover.close(10)
    assert num_queued == 0, "told while a copy was still to run"
    assert "does not fit" in str(moved.error)
