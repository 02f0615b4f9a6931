"""Executes the copies that kv_core's manager orders between its tiers.

In:  `KVCacheManager.take_copies()`, in order.
Out: Progress: what has ended, which copies failed, which places lost their bytes.
Law: nothing is overwritten before it is copied: an order runs after all of its `after`. A file that fails is a lost
     place, never an exception: nothing is copied from a lost place, so nothing false spreads. Core spec 9.3, D11, D12.
     So is one that hangs: its order ends after `file_limit_s` of the pools, those behind it at once (`file_threads`).

One step of an engine:

    engine.submit(manager.take_copies())
    progress = engine.wait()                    on CUDA: the current stream waits, not the caller, unless files are read
    manager.copies_done(progress.below)
    progress.lost                               requests that have such a block must be admitted anew

A place is lost until something is copied to it. A device slot is also written by the model, of which we see nothing:
it counts as lost until the engine has been told and all orders have ended.
"""

import logging
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Final, NamedTuple

import torch

from kv_core.errors import CallerError
from kv_core.tiers import CopyOrder, Place, Tier
from kv_transfer.block_pools import BlockPools
from kv_transfer.copy_queue import CopyQueue
from kv_transfer.file_mover import Hung
from kv_transfer.slot_copier import SlotCopier
from kv_transfer.slot_files import Corrupt
from kv_transfer.threads import leave_pinned_core

logger = logging.getLogger(__name__)

CLOSE_S: Final = 60.0
"""More than an order may take whose files hang one after another."""


class Miss(NamedTuple):
    """A copy that did not happen, and why."""

    order: CopyOrder
    reason: str


class Progress(NamedTuple):
    """All orders with an id less than `below` have ended. `misses` are new since the last Progress.

    `lost` is empty while orders are open; then it names the places that hold nothing although an order was to fill
    them, each once.
    """

    below: int
    misses: tuple[Miss, ...]
    lost: tuple[Place, ...]


class CopyTotals(NamedTuple):
    """Orders since the engine began: all that ended, those that missed, and why: a file had changed, or it hung."""

    num_ended: int = 0
    num_missed: int = 0
    num_corrupt: int = 0
    num_hung: int = 0


class CopyEngine:
    """Copies over the pools of one manager, in the caller's thread (`num_workers` 0) or in threads of its own.

    Threads only pay where there are files: they read and write while the model runs. `submit`, `poll` and `wait` are
    called by one thread.
    """

    def __init__(self, pools: BlockPools, *, num_workers: int = 0) -> None:
        self._copier = SlotCopier(pools)
        self._queue = CopyQueue()
        self._misses: list[Miss] = []
        self._totals = CopyTotals()
        self._lost: set[Place] = set()
        self._untold: set[Place] = set()
        self._error: Exception | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._streams = _Streams(pools.device)
        self._workers = [
            threading.Thread(target=self._work, name=f"kvferry-copy-{number}", daemon=True)
            for number in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, orders: Iterable[CopyOrder]) -> None:
        """Execute these orders after what the current stream was given so far; without workers now.

        CallerError after `close`, and for orders that do not follow those submitted before.
        """
        with self._changed:
            self._check_open()
            self._queue.add(orders)
            self._streams.fork()
            self._changed.notify_all()
        if not self._workers:
            while self._step():
                pass

    def poll(self) -> Progress:
        """What has happened. Raises what a worker raised."""
        with self._changed:
            return self._progress()

    def wait(self, timeout_s: float | None = None) -> Progress:
        """The same when all orders have ended, and on CUDA for whatever the current stream is given next.

        TimeoutError if orders are still open then.
        """
        deadline = None if timeout_s is None else monotonic() + timeout_s
        with self._changed:
            while self._queue.num_open and self._error is None:
                self._check_open()
                left = None if deadline is None else deadline - monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"copies are open after {timeout_s} s: open={self._queue.num_open}")
                self._changed.wait(left)
            self._streams.join()
            return self._progress()

    @property
    def totals(self) -> CopyTotals:
        """What has happened so far."""
        with self._changed:
            return self._totals

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """End the threads; orders that have not begun are dropped. Idempotent.

        False if an order did not end by then: it is left behind, and what it works on must be kept.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        deadline = monotonic() + timeout_s
        for worker in self._workers:
            worker.join(max(0.0, deadline - monotonic()))
        if any(worker.is_alive() for worker in self._workers):
            logger.error("a copy did not end within %s s, and is left behind", timeout_s)
            return False
        self._streams.drain()
        return True

    def _check_open(self) -> None:
        if self._is_closed:
            raise CallerError(f"the copy engine is closed: open orders={self._queue.num_open}")

    def _progress(self) -> Progress:
        if self._error is not None:
            raise self._error
        misses, self._misses = tuple(self._misses), []
        lost: tuple[Place, ...] = ()
        if not self._queue.num_open:
            lost = tuple(sorted(self._untold))
            self._untold.clear()
            self._lost = {place for place in self._lost if place.tier is not Tier.DEVICE}
        return Progress(self._queue.below, misses, lost)

    def _work(self) -> None:
        leave_pinned_core()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._queue.num_ready)
                if self._is_closed:
                    return
            self._step()

    def _step(self) -> bool:
        """Execute one order; False if none may run now."""
        with self._changed:
            order = self._queue.take()
            source_is_lost = order is not None and order.source in self._lost
        if order is None:
            return False
        failure = OSError("its source was lost before") if source_is_lost else self._attempt(order)
        with self._changed:
            self._note(order, failure)
            self._queue.end(order.order_id)
            self._changed.notify_all()
        return True

    def _attempt(self, order: CopyOrder) -> OSError | None:
        """Why the copy failed; None if it did not."""
        try:
            with self._streams.on_own():
                self._copier.copy(order)
        except OSError as error:
            return error
        except Exception as error:
            if not self._workers:
                raise
            self._error = error
        return None

    def _note(self, order: CopyOrder, failure: OSError | None) -> None:
        ended, missed, corrupt, hung = self._totals
        corrupt += isinstance(failure, Corrupt)
        hung += isinstance(failure, Hung)
        self._totals = CopyTotals(ended + 1, missed + (failure is not None), corrupt, hung)
        if failure is None:
            self._lost.discard(order.destination)
            self._untold.discard(order.destination)
            return
        self._misses.append(Miss(order, str(failure)))
        self._lost.add(order.destination)
        self._untold.add(order.destination)


class _Streams:
    """The stream on which copies are queued, and its order against the engine's; nothing where there are no streams.

    One stream for all workers: an order that was handed out after another had ended is also behind it on the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def fork(self) -> None:
        """What is queued from now on comes after what the current stream has."""
        if self._own is not None:
            self._own.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """What the current stream is given from now on comes after what is queued."""
        if self._own is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._own)

    def on_own(self) -> AbstractContextManager[object]:
        """Makes it the current stream of this thread."""
        return nullcontext() if self._own is None else torch.cuda.stream(self._own)

    def drain(self) -> None:
        if self._own is not None:
            self._own.synchronize()
