"""The seed forecasts and supposes (core spec 10).

In:  questions.
Out: numbers of blocks.
Law: see `seed_model`.
"""

from contract.naive_forecast import seed_remaining
from contract.seed_admitting import SeedAdmitting
from contract.seed_model import NoFreeBlock, SeedWindow
from contract.seed_sequence import Answer, SeedSequence, Step
from kv_core.spans import ceil_div


class SeedForecasts(SeedAdmitting):
    """Needed and remaining blocks, dry runs."""

    def op_set_request_state(self, step: Step) -> None:
        self._one(step).is_decoding = step["state"] == "generation_in_progress"
        self._one(step).is_complete = step["state"] == "generation_complete"

    def op_get_needed_blocks_one_step(self, step: Step) -> Answer:
        one, window = self._one(step), step["window"]
        if one.is_complete or (one.is_decoding and self.config["cache_type"] == "cross"):
            return {"value": 0}
        if not one.is_decoding:
            return {"value": self._blocks_of_prompt(one, min(one.forecast_length, window + one.max_new))}
        next_length = one.num_tokens + self._num_growing(one, step)
        if next_length > max(window, self.config["max_sequence_length"]):
            return {"value": 0}
        return {"value": (ceil_div(next_length, self.size) - ceil_div(one.num_tokens, self.size)) * one.beam_width}

    def _blocks_of_prompt(self, one: SeedSequence, length: int) -> int:
        return length // self.size + (one.beam_width if length % self.size else 0)

    def _num_growing(self, one: SeedSequence, step: Step) -> int:
        wanted = (2 if step.get("two_steps_look_ahead") else 1) * (one.num_drafts + 1)
        return min(wanted, one.max_new - (one.num_tokens - one.told_length))

    def op_get_remaining_blocks_to_completion(self, step: Step) -> Answer:
        one, window = self._one(step), self._window(step)
        if self.config["cache_type"] == "cross":
            return {"value": 0 if one.is_decoding or one.is_complete else ceil_div(one.forecast_length, self.size)}
        held = window.held.get(one.request_id)
        return {
            "value": seed_remaining(*self._lengths(one, window), len(held.beams[0]) if held else 0, *self._width(one))
        }

    def _lengths(self, one: SeedSequence, window: SeedWindow) -> tuple[int, int, int, int, int]:
        return one.told_length, one.max_new, window.window, self._temporary(window), one.num_tokens

    def _width(self, one: SeedSequence) -> tuple[int, int]:
        return one.beam_width, self.size

    def op_start_scheduling(self, step: Step) -> None:
        for window in self.windows:
            window.scheduling_free = window.num_free()
            for held in window.held.values():
                for block in held.allocated:
                    block.scheduling_refs = block.refs

    def op_scheduling_remove_sequence(self, step: Step) -> None:
        for window in self.windows:
            for block in window.held[step["request_id"]].allocated:
                if not block.scheduling_refs:
                    raise NoFreeBlock
                block.scheduling_refs -= 1
                window.scheduling_free += not block.scheduling_refs

    def op_scheduling_has_free_blocks(self, step: Step) -> Answer:
        return {"value": self._window(step).scheduling_free >= step["num_required"]}
