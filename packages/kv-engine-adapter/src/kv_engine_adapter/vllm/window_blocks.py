"""The blocks of a prompt's last window, kept for the decode engine although vLLM's own window has moved on.

In:  prefill requests that are to be offered, vLLM's KV cache manager, the window of each group.
Out: block tables in which the last prompt token still finds all that it sees.
Law: a block kept is given back once: when its request ends unoffered, is preempted, or is reported as sent.

    tokens      ... | N-W ...... N-2   N-1 | N ...         prompt of N tokens, window W that counts the token itself
    decode          [ reads N-W to N-2     ) and computes N-1
    vLLM keeps             N-W+1 to N-1      once N-1 is computed: where N-W ends a block, that block is free
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_core.spans import Span
from kv_engine_adapter.orders import Tables
from kv_engine_adapter.vllm.groups import ModelCaches
from kv_transfer.plan.plan import seen_by_next
from kv_transfer.plan.ranges import HOLE

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = logging.getLogger(__name__)

Place = tuple[int, int]
"""Group and ordinal of a block of a request."""


@dataclass(slots=True)
class _Watched:
    """A prefill request; without blocks until the step that computes its last prompt token."""

    num_prompt_tokens: int
    blocks: "dict[Place, KVCacheBlock]" = field(default_factory=dict)


class WindowBlocks:
    """Extra references to blocks of the engine, for requests that are on their way to an offer."""

    def __init__(self, model: ModelCaches) -> None:
        self._model = model
        self._manager: KVCacheManager | None = None
        self._watched: dict[str, _Watched] = {}

    def __len__(self) -> int:
        """Requests that blocks are, or will be, kept for."""
        return len(self._watched)

    def bind(self, manager: "KVCacheManager") -> None:
        """Where vLLM hands us no manager nothing is kept, and a prompt whose window has moved on is not offered."""
        self._manager = manager

    def watch(self, request_id: str, num_prompt_tokens: int) -> None:
        """This request will be offered if all goes well; told again when it begins anew after a preemption."""
        self.forget(request_id)
        if self._manager is not None and any(self._model.windows):
            self._watched[request_id] = _Watched(num_prompt_tokens)

    def keep(self, preempted: Iterable[str] = ()) -> None:
        """Once a step, before it runs: keep the last windows of the prompts that will be computed to their end.

        What was kept of a preempted request goes back: it begins anew, and may need these very blocks to do so.
        """
        for request_id in preempted:
            # One that has begun anew in this very step is watched already, and has nothing.
            if request_id in self._watched and self._watched[request_id].blocks:
                self.forget(request_id)
        for request_id, watched in self._watched.items():
            if not watched.blocks:
                self._keep(request_id, watched)

    def completed(self, request_id: str, num_prompt_tokens: int, tables: Tables) -> Tables | None:
        """The tables with what was kept; `None` if something that the last prompt token sees is gone."""
        watched = self._watched.get(request_id)
        full = [list(table) for table in tables]
        for (group, ordinal), block in (watched.blocks if watched is not None else {}).items():
            full[group][ordinal] = block.block_id
        if any(full[group][ordinal] == HOLE for group, ordinal in self._last_window(num_prompt_tokens)):
            return None
        return tuple(map(tuple, full))

    def forget(self, request_id: str) -> None:
        """The request is sent, or will not be, or is preempted: the engine may have its blocks back."""
        watched = self._watched.pop(request_id, None)
        if watched is not None and watched.blocks:
            assert self._manager is not None, "law: only what a manager gave is kept"
            self._manager.block_pool.free_blocks(watched.blocks.values())

    def check(self) -> None:
        """Proves the invariants; for tests."""
        assert self._manager is not None or not self._watched, "law: only what a manager gave is kept"
        for request_id, watched in self._watched.items():
            if watched.blocks:
                places = set(self._last_window(watched.num_prompt_tokens))
                assert watched.blocks.keys() == places, f"law: the whole last window is kept, and no more: {request_id}"
            for block in watched.blocks.values():
                assert not block.is_null, f"law: what is kept is a block: {request_id}"
                assert block.ref_cnt > 0, f"law: what is kept is not free: {request_id}, block {block.block_id}"

    def _keep(self, request_id: str, watched: _Watched) -> None:
        assert self._manager is not None, "law: nothing is watched without a manager"
        tables = self._manager.get_blocks(request_id).blocks
        if any(len(table) * self._model.block_size < watched.num_prompt_tokens for table in tables):
            return
        places = self._last_window(watched.num_prompt_tokens)
        watched.blocks = {(group, ordinal): tables[group][ordinal] for group, ordinal in places}
        if any(block.is_null for block in watched.blocks.values()):
            watched.blocks = {}
        self._manager.block_pool.touch(list(watched.blocks.values()))

    def _last_window(self, num_prompt_tokens: int) -> Iterator[Place]:
        """Where the blocks lie that the last token of a prompt sees through the windows of its groups."""
        before = Span(0, num_prompt_tokens - 1)
        for group, window in enumerate(self._model.windows):
            if window and before:
                seen = seen_by_next(before, window, chunked=self._model.is_chunked)
                for ordinal in seen.blocks(self._model.block_size):
                    yield group, ordinal
