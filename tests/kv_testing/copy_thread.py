"""A copy thread over lanes that only count: what is queued is over when a test lets it.

In:  jobs of a test, each with a name. Out: which have begun, which have ended, in order.
"""

import queue
from contextlib import nullcontext

import torch

from kv_transfer.lanes import Lane
from kv_transfer.mover import Mover

WAIT_S = 10


class CountedLanes:
    """A clock for each lane: what was queued when it showed n is over when it has been let on to more than n."""

    def __init__(self):
        self.num_queued = dict.fromkeys(Lane, 0)
        self.num_over = dict.fromkeys(Lane, 0)
        self.orders = []
        self.lost = None
        self.wakes = queue.SimpleQueue()

    def mark(self):
        return None

    def on(self, lane, after):
        self.orders.append((lane, after))
        return nullcontext()

    def end_of(self, lane, wake):
        wanted = self.num_queued[lane]
        self.wakes.put(wake)

        def is_over():
            if self.lost is not None:
                raise self.lost
            return self.num_over[lane] >= wanted

        return is_over

    def close(self):
        self.is_closed = True

    def queue(self, lane):
        self.num_queued[lane] += 1

    def let_on(self, lane, num=1):
        self.num_over[lane] += num


class Thread:
    """A mover whose ends are kept in a queue; `begun` names the jobs that have begun."""

    def __init__(self):
        self.lanes, self.ends, self.begun = CountedLanes(), queue.SimpleQueue(), queue.SimpleQueue()
        self.mover = Mover(torch.device("cpu"), lambda call: call(), self.lanes)

    def copy(self, name, lane=Lane.IN, num=1, fails=None, **more):
        def run():
            self.begun.put(name)
            for _ in range(num):
                self.lanes.queue(lane)
            if fails is not None:
                raise fails
            return name

        self.mover.submit(run, None, lambda moved: self.ends.put((name, moved)), lane=lane, **more)

    def next_begun(self):
        return self.begun.get(timeout=WAIT_S)

    def next_end(self):
        return self.ends.get(timeout=WAIT_S)

    def nothing_ends(self):
        """After the thread has looked at what it has, which a job that is over at once tells."""
        self.mover.submit(lambda: None, None, lambda moved: self.ends.put(("look", moved)), lane=Lane.OUT)
        assert self.next_end()[0] == "look"

    def close(self):
        """Lets everything end; whether the thread has."""
        self.lanes.num_over = dict.fromkeys(Lane, 1 << 30)
        return self.mover.close(WAIT_S)
