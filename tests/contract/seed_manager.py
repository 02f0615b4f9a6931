"""The seed's cache manager on the steps of a scenario, for rules that need its answer (core spec 1, 7, 8).

In:  the config of a scenario and its steps, one by one.
Out: the fields that the cases may expect, as the seed gives them; None for an operation that is not modelled.
Law: see `seed_model`.
"""

from contract.seed_forecasts import SeedForecasts
from contract.seed_model import Block, Key, NoFreeBlock, SeedWindow
from contract.seed_sequence import Answer, SeedSequence, Step, decode_wish


class SeedManager(SeedForecasts):
    """All operations: growing, storing, releasing, time, questions."""

    # Growing (7.4) and shrinking.

    def op_append_tokens(self, step: Step) -> None:
        self._one(step).tokens += [(token, 0) for token in step["tokens"]]

    def op_add_token(self, step: Step) -> Answer:
        for _ in range(step["count"]):
            self._grow(self._one(step))
        return self._table(self._one(step))

    def op_decode(self, step: Step) -> Answer:
        for token in step["tokens"]:
            self._one(step).tokens.append((token, 0))
            self._grow(self._one(step))
        return self._table(self._one(step))

    def _grow(self, one: SeedSequence) -> None:
        one.num_tokens += 1
        for window in self.windows:
            held = window.held[one.request_id]
            while one.num_tokens - one.front_removed * self.size >= window.window + self.size:
                if not window.is_sliding or one.beam_width > 1:
                    raise NoFreeBlock
                window.drop(window.blocks[held.beams[0][one.front_removed]])
                one.front_removed += 1
            if (one.num_tokens - 1) % self.size == 0:
                for beams in [[0]] if one.beam_width == 1 else [[beam] for beam in range(one.beam_width)]:
                    window.list_block(held, window.take(one.request_id, *decode_wish(one)), beams)

    def op_rewind_kv_cache(self, step: Step) -> Answer:
        one = self._one(step)
        for _ in range(step["num_tokens"]):
            one.num_tokens -= 1
            for window in self.windows:
                if one.num_tokens % window.window % self.size == 0:
                    held = window.held[one.request_id]
                    held.beams[0].pop()
                    window.drop(held.allocated.pop(), to_front=True)
        del one.tokens[one.num_tokens :]
        return self._table(one)

    # Storing and releasing (4.5, 8.5, 8.6).

    def op_store_context_blocks(self, step: Step) -> Answer:
        one = self._one(step)
        if self.config["enable_block_reuse"] and not (one.content or {}).get("is_dummy"):
            for window in self.windows:
                if not window.is_sliding:
                    self._store(window, one, one.keys(len(one.tokens) - 1, self.size, False))
        return self._table(one)

    op_store_new_block = op_store_context_blocks

    def op_store_blocks_for_reuse(self, step: Step) -> Answer:
        one, pinned = self._one(step), []
        for window in self.windows:
            keys = one.keys(len(one.tokens) - 1, self.size, True)
            pinned = self._store(window, one, keys, bool(step.get("pin_blocks")))
        return {"pinned_block_ids": pinned} | self._table(one)

    def _store(self, window: SeedWindow, one: SeedSequence, keys: list[Key], pin: bool = False) -> list[int]:
        return window.store(keys, [window.blocks[number] for number in window.held[one.request_id].beams[0]], pin)

    def op_remove_sequence(self, step: Step) -> None:
        one = self._one(step)
        told = one.tokens
        if step.get("request_tokens_override") is not None:
            one.tokens = [(token, 0) for token in step["request_tokens_override"]]
        stores = step.get("with_request", True) and one.content is not None and not one.content.get("is_dummy")
        stores = stores and one.beam_width == 1 and self.config["enable_block_reuse"]
        stores = stores and all(window.valid[one.request_id] for window in self.windows)
        for window in self.windows:
            held = window.held[one.request_id]
            if stores:
                window.store(one.keys(len(one.tokens) - 1, self.size, True), held.allocated)
            for block in reversed(held.allocated[one.front_removed :]):
                window.drop(block)
            one.front_removed = 0
        for window in self.windows:
            del window.held[one.request_id], window.valid[one.request_id]
        one.tokens = told

    def op_pin_blocks(self, step: Step) -> None:
        for window in self.windows:
            for block in window.held[step["request_id"]].allocated:
                block.refs += 1

    def op_unpin_blocks_by_id(self, step: Step) -> None:
        for number in step["block_ids"]:
            if not 0 <= number < len(self.windows[0].blocks) or not self.windows[0].blocks[number].refs:
                raise NoFreeBlock
            self.windows[0].drop(self.windows[0].blocks[number])

    def op_get_last_block_id(self, step: Step) -> Answer:
        return {"block_id": self.windows[0].held[step["request_id"]].beams[0][-1]}

    # Time, tiers, questions.

    def op_advance_time_ms(self, step: Step) -> None:
        self.clock.now += step["ms"]

    def op_refresh_blocks(self, step: Step) -> None:
        for window in self.windows:
            window.refresh()

    def op_offload_block(self, step: Step) -> Answer:
        window, block = self._block(step)
        if block.level == 0 and window.num_free(1):
            lower = window.victim(1)
            window.claim(lower)
            window.swap(block, lower)
            window.release(lower)
            if block.name is not None:
                window.log.level(window.window, block.name, 0, 1)
        return self.op_inspect_block(step)

    def op_onboard_block(self, step: Step) -> Answer:
        window, block = self._block(step)
        window.onboard(step["request_id"], block)
        return self.op_inspect_block(step)

    def op_set_block_priority(self, step: Step) -> None:
        self._block(step)[1].priority = step["priority"]

    def op_inspect_block(self, step: Step) -> Answer:
        block = self._block(step)[1]
        parent = None if block.prev is None else block.prev.block_id
        primary, held = block.level == 0, block.refs > 0
        return {"is_primary": primary, "prev_block_id": parent, "priority": block.priority, "has_refs": held}

    def op_find_blocks_in_reuse_tree(self, step: Step) -> Answer:
        window = self._window(step)
        one = self._new({"request_id": -1}, step)
        cursor: Block | None = window.root
        chain = []
        for key in one.keys(len(one.tokens), self.size, True):
            cursor = window.find(cursor, key, True, True)[2]
            if cursor is None:
                return {"found": False, "chain_block_ids": []}
            chain.append(cursor.block_id)
        return {"found": True, "chain_block_ids": chain}

    def op_find_new_context_block(self, step: Step) -> Answer:
        one, cursor = self._new({"request_id": -1}, step), self.windows[0].root
        for at, key in enumerate(one.keys(len(one.tokens), self.size, False)):
            found = self.windows[0].find(cursor, key, False, False)[2]
            if found is None:
                return {"new_block_tokens": step["tokens"][: (at + 1) * self.size]}
            cursor = found
        return {"new_block_tokens": None}

    def op_get_events(self, step: Step) -> Answer:
        return {"events": self.log.take()}

    def op_fill_block(self, step: Step) -> None:
        """What blocks hold is not modelled; how many are free is told after every step."""

    op_clear_block = op_check_block_content = op_get_layer_to_pool_mapping = op_fill_block

    def op_get_counters(self, step: Step) -> Answer:
        primary = sum(counts[0] for counts in self.config["blocks_per_window"].values())
        return self._counts() | {"used_blocks": primary - sum(window.num_free() for window in self.windows)}

    def op_inspect_request(self, step: Step) -> Answer:
        return {"prepopulated": self._one(step).prepopulated}

    def op_verify_queue_integrity(self, step: Step) -> Answer:
        return {"ok": not any(block.refs for window in self.windows for block in window.queue)}

    def op_is_sequence_valid_for_store_for_reuse(self, step: Step) -> Answer:
        valid = {str(window.window): window.valid[step["request_id"]] for window in self.windows}
        only = valid[str(self._window(step).window)] if "window" in step or len(valid) == 1 else valid
        return {"value": only, "valid": only}
