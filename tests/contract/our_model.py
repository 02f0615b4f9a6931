"""Our block manager as lists and dicts, for rules that need to know what we do instead of the seed.

In:  the same steps as the seed's model.
Out: the same fields, with the documented defects fixed; `causes`, the defects whose fix has made a difference so far.
Law: block by block and obviously so; nothing of kv_core's manager is used. A rule compares its answer with what kv_core
     returned, so a mistake in here, or in kv_core, can only make a case fail.
"""

from typing import Any

from contract.our_forecasts import Forecasts
from contract.our_window import ASIDE, HOLE, OurWindow
from contract.seed_model import DEFAULT_PRIORITY, Block
from contract.seed_sequence import Answer, SeedSequence, Step


class OurManager(Forecasts):
    """The whole manager: explicit moves and questions, on top of all else."""

    def op_set_block_priority(self, step: Step) -> None:
        """Blocks that hold nothing and are nobody's have none."""
        window, block = self._our_block(step)
        if block.in_tree and block.priority != step["priority"]:
            window.log.priority(window.window, block.name, block.priority, step["priority"])
            self.causes.add("core-D52")
        if block.in_tree or block.refs:
            block.priority = step["priority"]
        if not block.in_tree:
            block.duration = None

    def op_offload_block(self, step: Step) -> Answer:
        """By the laws of eviction: what is held, empty, depended on, or without room below stays (D6)."""
        window, block = self._our_block(step)
        self.causes.add("core-D6")
        may_go = self.config["onboard_blocks"] and block.in_tree and not block.refs and block.level == 0
        if may_go and window.num_free(1) and (window.is_sliding or not window.kin(block)):
            window.queue.remove(block)
            block.level = ASIDE
            [(lower, notes)] = window.make_room(1, 1, 0)
            window.tell([window.move_down(block, 0, lower, notes)])
            lower.priority, lower.duration, lower.key = DEFAULT_PRIORITY, None, None
            window.release(lower)
        return self.op_inspect_block(step)

    def op_onboard_block(self, step: Step) -> Answer:
        window, block = self._our_block(step)
        self.causes.add("core-D6")
        path = [block] if block.in_tree and block.level else []
        while path and not window.is_sliding and path[-1].prev is not None and path[-1].prev is not window.root:
            path.append(path[-1].prev)
        if path and not any(one.level for one in path[1:]):
            for one in path:
                window.hold(one)
                one.used = self.now
            if window.num_free():
                window.bring([block], 0)
            for one in path:
                window.let_go(one)
        return self.op_inspect_block(step)

    def _our_block(self, step: Step) -> tuple[OurWindow, Block]:
        window, block = self._block(step)
        return self.ours[self.windows.index(window)], block

    def op_inspect_block(self, step: Step) -> Answer:
        answer = super().op_inspect_block(step)
        parent = self._block(step)[1].prev
        return answer | ({"prev_block_id": None} if parent is not None and parent.block_id == HOLE else {})

    def op_get_last_block_id(self, step: Step) -> Answer:
        block = self.tables[step["request_id"]][0][0][-1]
        return {"block_id": None if block is None else block.block_id}

    def op_find_blocks_in_reuse_tree(self, step: Step) -> Answer:
        """Whole blocks exactly, only the last one in part (D9)."""
        window = self.ours[self.windows.index(self._window(step))]
        one = self._new({"request_id": -1}, step)
        self._check_items(step)
        keys = one.keys(len(one.tokens), self.size, True)
        cursor: Block = window.root
        chain: list[int | None] = []
        for at, key in enumerate(keys):
            found: Block | None = cursor.children.get(key) if len(key.tokens) == self.size else None
            if found is None and at == len(keys) - 1:
                found = window.best(cursor.children.values(), key)[1]
            if found is None and window.best(cursor.children.values(), key)[1] is not None:
                self.causes.add("core-D9")
            if found is None:
                return {"found": False, "chain_block_ids": []}
            chain.append(None if found.block_id == HOLE else found.block_id)
            cursor = found
        return {"found": True, "chain_block_ids": chain}

    def op_find_new_context_block(self, step: Step) -> Answer:
        """Only full blocks that all windows serve; who may share is part of it (D43)."""
        self._check_items(step)
        return super().op_find_new_context_block(step)

    def _table(self, one: SeedSequence) -> Answer:
        return {"block_ids": None} if one.request_id not in self.tables else {"block_ids": self._listed(one)}

    def _listed(self, one: SeedSequence) -> Any:
        tables = {}
        for window, table in zip(self.windows, self.tables[one.request_id], strict=True):
            beams = []
            for number, beam in enumerate(table):
                before = self.listed.setdefault((one.request_id, window.window, number), [])
                now = [before[at] if block is None and at < len(before) else None if block is None else block.block_id
                       for at, block in enumerate(beam)]  # fmt: skip
                self.listed[one.request_id, window.window, number] = now
                beams.append(list(now))
            tables[str(window.window)] = beams[0] if one.beam_width == 1 else beams
        return tables if len(tables) > 1 else next(iter(tables.values()))

    def op_is_sequence_valid_for_store_for_reuse(self, step: Step) -> Answer:
        valid = {
            str(window.window): all(block is not None for block in table[0])
            for window, table in zip(self.windows, self.tables[step["request_id"]], strict=True)
        }
        only = valid[str(self._window(step).window)] if "window" in step or len(valid) == 1 else valid
        return {"value": only, "valid": only}
