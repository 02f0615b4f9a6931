"""Running requests of models with windows, whose blocks are copied before a window leaves them behind.

In:  requests that got blocks; vLLM's steps.
Out: what of them is to be kept now: whole blocks that a step computes.
Law: every whole block of a prompt is told in the step that computes it, or together with the block before it that was
     in a cache; and the block in which the prompt ends once it is full. What follows is told when the request ends.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kv_core.ids import RequestId
from kv_core.spans import Span, ceil_div
from kv_engine_adapter.vllm.translate import RequestView, scheduled_requests

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Reached(NamedTuple):
    """Tokens of a request, whole blocks, that are computed when this step has run."""

    view: RequestView
    tokens: Span


class RunningRequests:
    """Those of which something is still to be told."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._told: dict[RequestId, tuple[RequestView, int]] = {}

    def __len__(self) -> int:
        return len(self._told)

    def watch(self, view: RequestView) -> None:
        """It got blocks; again if it begins anew."""
        self._told[view.request_id] = view, 0

    def forget(self, request_id: RequestId) -> None:
        """It has ended."""
        self._told.pop(request_id, None)

    def reached(self, output: "SchedulerOutput") -> Iterator[Reached]:
        """What this step computes."""
        if not self._told:
            return
        for scheduled in scheduled_requests(output, self._told):
            view, num_told = self._told[scheduled.request_id]
            stop = self._whole(view, scheduled.num_computed, scheduled.num_scheduled)
            if stop > num_told:
                self._told[scheduled.request_id] = view, stop
                yield Reached(view, Span(num_told, stop))
            if stop >= view.num_prompt_tokens:
                self.forget(scheduled.request_id)

    def _whole(self, view: RequestView, num_computed: int, num_scheduled: int) -> int:
        """How many tokens, in whole blocks, are there for certain after a step."""
        size, num_prompt = self._tokens_per_block, view.num_prompt_tokens
        end = ceil_div(num_prompt, size) * size
        # Why not what is scheduled: behind the prompt it may be guesses of a speculative decoder.
        if min(num_computed, view.num_tokens - 1) >= end:
            return end
        return min(num_computed + num_scheduled, num_prompt) // size * size
