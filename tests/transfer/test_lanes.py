"""The thread that waits for events, over events of the test: it wakes in order, and an error is somebody else's."""

import queue
import threading

import pytest
import torch

from kv_transfer.lanes import CudaLanes, HostLanes, Lane, _Waiter

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
