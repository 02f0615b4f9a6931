"""Our manager forecasts and supposes (D15, D26, D60, D62).

In:  questions.
Out: numbers of blocks.
Law: see `our_model`.
"""

from contract.naive_forecast import our_remaining
from contract.our_growing import Growing
from contract.seed_model import Block
from contract.seed_sequence import Answer, SeedSequence, Step
from kv_core.spans import ceil_div


class Forecasts(Growing):
    """Needed and remaining blocks, dry runs."""

    def op_get_needed_blocks_one_step(self, step: Step) -> Answer:
        """A prompt takes all its blocks at once (D26), but those that others hold (D60); growth has an end (D62)."""
        one = self._one(step)
        if one.is_complete or one.is_decoding:
            if not one.is_decoding or self.config["cache_type"] == "cross":
                return {"value": 0}
            longest = max(step["window"], self.config["max_sequence_length"])
            wanted = one.num_tokens + self._num_growing(one, step)
            if wanted > longest or wanted < one.num_tokens:
                self.causes.add("core-D62")
            stop = max(one.num_tokens, min(wanted, longest))
            return {"value": (ceil_div(stop, self.size) - ceil_div(one.num_tokens, self.size)) * one.beam_width}
        if one.forecast_length > step["window"] + one.max_new:
            self.causes.add("core-D26")
        return {"value": max(0, self._blocks_of_prompt(one, one.forecast_length) - self._held_hits(one, step))}

    def op_get_remaining_blocks_to_completion(self, step: Step) -> Answer:
        one, window = self._one(step), self._window(step)
        if self.config["cache_type"] == "cross":
            return super().op_get_remaining_blocks_to_completion(step)
        tables = self.tables.get(one.request_id)
        live = sum(block is not None for block in tables[self.windows.index(window)][0]) if tables else 0
        if window.is_sliding or live > ceil_div(one.told_length + one.max_new, self.size):
            self.causes.add("core-D26")
        needed = our_remaining(*self._lengths(one, window), live, *self._width(one))
        return {"value": max(0, needed - self._held_hits(one, step))}

    def _held_hits(self, one: SeedSequence, step: Step) -> int:
        """Whole blocks of a prompt to come that are cached and that others hold: they will not be taken (D60)."""
        if one.request_id in self.tables or not self.config["enable_block_reuse"] or one.content is None:
            return 0
        usable = len(one.tokens) - 1
        nodes = self.ours[self.windows.index(self._window(step))].walk(one.keys(usable, self.size, False), usable)
        hits = sum(block.refs > 0 for block in nodes)
        self.causes.update(["core-D60"] if hits else [])
        return hits

    def op_start_scheduling(self, step: Step) -> None:
        self.supposed_free = {window.window: window.num_free() for window in self.windows}
        self.supposed: list[Block] = []

    def op_scheduling_remove_sequence(self, step: Step) -> None:
        """Only live blocks come back, when the last of their holders ends (D15)."""
        for window, table in zip(self.windows, self.tables[step["request_id"]], strict=True):
            if None in table[0]:
                self.causes.add("core-D15")
            blocks = {block for beam in table for block in beam if block is not None}
            self.supposed += blocks
            freed = sum(self.supposed.count(block) == block.refs for block in blocks)
            self.supposed_free[window.window] += freed

    def op_scheduling_has_free_blocks(self, step: Step) -> Answer:
        return {"value": self.supposed_free[self._window(step).window] >= step["num_required"]}
