"""Operations that ask which blocks of a request travel.

In:  steps of a scenario that name tokens as the seed does: by the key of the last block and a count from the end.
Out: block ids per window, from `kv_transfer.plan.ranges`.
Law: nothing in the manager changes. The asked tokens come from the request's own table while it has one and they are
     its own; otherwise from the tree, if it holds exactly them.
"""

from collections.abc import Sequence

from contract.manager_questions import Questions
from contract.manager_state import Answer, Step, name_of
from kv_core.errors import CallerError
from kv_core.ids import BlockId, RequestId
from kv_core.request import Request
from kv_core.spans import Span, ceil_div
from kv_transfer.plan.plan import seen_by_next
from kv_transfer.plan.ranges import HOLE, block_range


class RangeQuestions(Questions):
    """Ranges for sending and receiving."""

    def op_block_range_for_sending(self, step: Step) -> Answer:
        key = step["last_block_key_tokens"]
        if not key:
            return self._ranges(step, Span(0, self._one(step).input_length), None)
        size = self._config["tokens_per_block"]
        first = (ceil_div(len(key), size) - step["index_from_end"] - 1) * size
        return self._ranges(step, Span(first, len(key)), key)

    def op_block_range_for_receiving(self, step: Step) -> Answer:
        one = self._one(step)
        assert one.admission is not None
        return self._ranges(step, Span(one.admission.num_prepopulated, one.input_length), None)

    def op_iterate_sequence_blocks(self, step: Step) -> Answer:
        table = self._served(step, self._windows[0], None)
        tokens = Span(0, self._manager.num_tokens(name_of(self._one(step))))
        found = block_range(table, tokens, self._config["tokens_per_block"])
        return {"block_ids": list(found.ids), "num_blocks": len(found.ids)}

    def _ranges(self, step: Step, tokens: Span, key: list[int] | None) -> Answer:
        found = {}
        for window in self._windows:
            sliding = window if self._manager.config.is_sliding(window) else 0
            seen = seen_by_next(tokens, sliding) if tokens else tokens
            served = block_range(self._served(step, window, key), seen, self._config["tokens_per_block"])
            found[str(window)] = list(served.ids)
        return {"block_ids_per_window": found}

    def _served(self, step: Step, window: int, key: list[int] | None) -> list[BlockId]:
        return [HOLE if block_id is None else block_id for block_id in self._table_for(step, window, key)]

    def _table_for(self, step: Step, window: int, key: list[int] | None) -> Sequence[BlockId | None]:
        """The table that serves a request's tokens, or those of a key; CallerError if nobody holds exactly them."""
        one = self._one(step)
        if key is None or one.tokens[: len(key)] == key:
            try:
                return self._manager.block_ids(name_of(one), window)
            except CallerError:
                if key is None:
                    raise
        found = self._manager.lookup(Request(RequestId("asked"), key), window)
        if found.num_tokens < len(key):
            raise CallerError(f"these tokens are not cached: wanted={len(key)}, found={found.num_tokens}")
        return found.block_ids
