"""The thread that waits for events, over events of the test: it wakes in order, and an error is somebody else's."""

import queue
import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kv_transfer.lanes import CudaLanes, HostLanes, Lane, _Waiter
from kv_transfer.mover import Mover

WAIT_S = 10


class Happening:
    """An event of which the test says when it has happened."""

    def __init__(self, is_broken=False):
        self.has_happened, self.is_broken = threading.Event(), is_broken

    def synchronize(self):
        assert self.has_happened.wait(WAIT_S)
        if self.is_broken:
            raise RuntimeError("the device is lost")


def test_events_are_told_in_order_and_one_that_fails_does_not_end_the_thread():
    waiter, told = _Waiter("test"), queue.SimpleQueue()
    first, second = Happening(is_broken=True), Happening()
    waiter.watch(first, lambda lost: told.put(("first", str(lost))))
    waiter.watch(second, lambda lost: told.put(("second", str(lost))))
    second.has_happened.set()
    assert told.empty()
    first.has_happened.set()
    assert [told.get(timeout=WAIT_S) for _ in range(2)] == [("first", "the device is lost"), ("second", "None")]
    waiter.close()


def test_on_a_cpu_all_is_over_at_once():
    lanes = HostLanes()
    assert lanes.end_of(Lane.IN, pytest.fail)()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_lanes_of_a_gpu_overlap_and_come_after_their_events():
    device, woken = torch.device("cuda:0"), queue.SimpleQueue()
    lanes, value = CudaLanes(device), torch.zeros(1, device=device)
    seen, other = torch.zeros(1, device=device), torch.zeros(1, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    value.fill_(8)
    after = lanes.mark()
    with lanes.on(Lane.IN, after):
        seen.copy_(value)
    is_seen = lanes.end_of(Lane.IN, lambda lost: woken.put("in"))
    with lanes.on(Lane.OUT, None):
        other.fill_(1)
    is_other = lanes.end_of(Lane.OUT, lambda lost: woken.put("out"))
    assert woken.get(timeout=WAIT_S) == "out", "the lanes wait for each other"
    assert is_other()
    assert not is_seen()
    assert woken.get(timeout=WAIT_S) == "in"
    assert is_seen()
    assert (seen.item(), other.item()) == (8, 1)
    lanes.close()


class PlayedCuda:
    """Streams and events as `torch.cuda` has them: an event is over when the test says so of its stream."""

    def __init__(self, monkeypatch):
        self.current = [self.stream_of()]
        self.log = []
        cuda = self

        class Event:
            def record(self, stream):
                self.stream, self.place = stream, stream.num_queued

            def query(self):
                return self.stream.num_over >= self.place

            def synchronize(self):
                with self.stream.changed:
                    assert self.stream.changed.wait_for(self.query, WAIT_S)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: cuda.stream_of())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: cuda.current[-1])
        monkeypatch.setattr(torch.cuda, "stream", cuda.on)

    def stream_of(self):
        cuda = self

        class Stream:
            def __init__(self):
                self.num_queued, self.num_over, self.changed = 0, 0, threading.Condition()

            def wait_event(self, event):
                cuda.log.append((self, event.stream))

        return Stream()

    @contextmanager
    def on(self, stream):
        self.current.append(stream)
        yield
        self.current.pop()

    def let_on(self, stream):
        with stream.changed:
            stream.num_over = stream.num_queued
            stream.changed.notify_all()


def test_the_copy_thread_over_streams_and_events(monkeypatch):
    """One job each way: each on its own stream, after the engine's event, told when its stream has come so far."""
    cuda, ends, used = PlayedCuda(monkeypatch), queue.SimpleQueue(), queue.SimpleQueue()
    mover = Mover(torch.device("cuda:0"), lambda call: call())
    engine = cuda.current[0]
    after = mover.mark()

    def run():
        stream: Any = torch.cuda.current_stream()
        stream.num_queued += 1
        used.put(stream)

    mover.submit(run, after, lambda moved: ends.put(("in", moved)), lane=Lane.IN)
    inward = used.get(timeout=WAIT_S)
    mover.submit(run, None, lambda moved: ends.put(("out", moved)), lane=Lane.OUT)
    outward = used.get(timeout=WAIT_S)
    assert len({inward, outward, engine}) == 3
    assert cuda.log == [(inward, engine)]
    assert ends.empty()
    cuda.let_on(outward)
    assert ends.get(timeout=WAIT_S)[0] == "out"
    assert ends.empty()
    cuda.let_on(inward)
    name, moved = ends.get(timeout=WAIT_S)
    assert (name, moved.error) == ("in", None)
    assert mover.close(WAIT_S)
