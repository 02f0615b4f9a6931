"""Events on their way from the engine's thread to readers (core spec 12.2).

In:  changes, and `flush` once a step, from the engine's thread.
Out: events, taken by any thread.
Law: what waits is bounded, before and after a flush. On overflow the oldest events go, and a `Reset` stands in their
     place (core spec D52). Only `flush`, `take` and `close` touch what threads share, under one lock.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence

from kv_core.events import Change, Created, Event, Payload, Removed, Reset, Stored, StoredPiece, Updated
from kv_core.keys import BlockKey, Scope


class EventLog:
    """Both ends of the stream. `max_size` bounds the events that wait on either side of a flush."""

    def __init__(self, max_size: int, rank: int | None = None) -> None:
        self._max_size = max_size
        self._rank = rank
        self._next_id = 0
        self._step: deque[Event] = deque()
        self._step_lost = 0
        self._changed = threading.Condition()
        self._published: deque[Event] = deque()
        self._lost = 0
        self._closed = False

    # The engine's thread.

    def created(self, window: int, num_blocks: Sequence[int]) -> None:
        """A window begins."""
        self._append(window, Created(tuple(num_blocks)))

    def stored(self, window: int, parent: BlockKey | None, scope: Scope, pieces: Sequence[StoredPiece]) -> None:
        """A chain entered the tree."""
        self._append(window, Stored(parent, scope, tuple(pieces)))

    def removed(self, window: int, keys: Sequence[BlockKey]) -> None:
        """Blocks left the tree; joins the last event if that is of the same kind and window."""
        last = self._step[-1] if self._step else None
        if last is not None and last.window == window and isinstance(last.payload, Removed):
            self._step[-1] = Event(last.event_id, window, Removed((*last.payload.keys, *keys)), self._rank)
        else:
            self._append(window, Removed(tuple(keys)))

    def tier_changed(self, window: int, key: BlockKey, old: int, new: int) -> None:
        """A block of the tree moved."""
        self._append(window, Updated(key, tier=Change(int(old), int(new))))

    def priority_changed(self, window: int, keys: Sequence[BlockKey], old: int, new: int) -> None:
        """Blocks of the tree are kept for longer or for shorter."""
        for key in keys:
            self._append(window, Updated(key, priority=Change(old, new)))

    def flush(self) -> None:
        """Hand the events of this step over and wake the readers."""
        with self._changed:
            self._lost += self._step_lost
            self._published += self._step
            while len(self._published) > self._max_size:
                self._published.popleft()
                self._lost += 1
            self._changed.notify_all()
        self._step.clear()
        self._step_lost = 0

    def _append(self, window: int, payload: Payload) -> None:
        self._step.append(Event(self._next_id, window, payload, self._rank))
        self._next_id += 1
        if len(self._step) > self._max_size:
            self._step.popleft()
            self._step_lost += 1

    # Any thread.

    def take(self, timeout_s: float | None) -> list[Event]:
        """All events flushed since the last call, waiting for some up to `timeout_s` (None: until `close`)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._published and not self._closed:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            events = list(self._published)
            self._published.clear()
            lost, self._lost = self._lost, 0
        if lost:
            first_id = events[0].event_id if events else self._next_id
            events.insert(0, Event(first_id, 0, Reset(lost), self._rank))
        return events

    def close(self) -> None:
        """Wake all readers for good."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def merged(by_rank: Sequence[Sequence[Event]], max_size: int) -> list[Event]:
    """What the ranks of an attention-DP group published, as one stream (core spec 12.2).

    Rank by rank, each in its own order; an event names its rank. At most `max_size` events a rank are kept, the latest;
    a `Reset` of that rank stands for what was lost.
    """
    stream: list[Event] = []
    for rank, events in enumerate(by_rank):
        lost = len(events) - max_size
        if lost > 0:
            stream.append(Event(events[lost].event_id, 0, Reset(lost), rank))
        stream += [Event(event.event_id, event.window, event.payload, rank) for event in events[max(0, lost) :]]
    return stream
