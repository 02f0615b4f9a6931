"""What is to be kept of running and ended requests, one copy after the other for each request.

In:  blocks of a request that have been computed, with the job for which the engine keeps them.
Out: the next one of a request, when the one before it has ended.
Law: what is decided about the next one knows what came of the one before, so nothing is copied twice.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.ids import RequestId
from kv_core.keys import Scope
from kv_core.retention import RetentionConfig
from kv_core.spans import Span
from kv_engine_adapter.orders import Tables
from kv_engine_adapter.tier_events import BlockName
from kv_engine_adapter.tier_orders import JobId


@dataclass(frozen=True, slots=True)
class Computed:
    """The first tokens of a request, of which `good` still lie in `tables`; `is_last` if it has ended."""

    request_id: RequestId
    tokens: Sequence[int]
    scope: Scope
    good: Span
    tables: Tables
    retention: RetentionConfig | None
    names: Sequence[BlockName]
    num_prompt_tokens: int
    is_last: bool = True


class Saves:
    """The copies of each request, in order; the first one of each is under way."""

    def __init__(self) -> None:
        self._queues: dict[RequestId, deque[tuple[JobId, Computed]]] = {}

    def is_saving(self, request_id: RequestId) -> bool:
        return request_id in self._queues

    def add(self, job: JobId, computed: Computed) -> bool:
        """Whether its turn is now."""
        queue = self._queues.setdefault(computed.request_id, deque())
        queue.append((job, computed))
        return len(queue) == 1

    def first(self, request_id: RequestId) -> JobId:
        """The job that is under way."""
        return self._queues[request_id][0][0]

    def ended(self, request_id: RequestId) -> tuple[JobId, Computed] | None:
        """The first one has ended; the one whose turn is now."""
        queue = self._queues[request_id]
        queue.popleft()
        if queue:
            return queue[0]
        del self._queues[request_id]
        return None
