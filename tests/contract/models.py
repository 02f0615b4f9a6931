"""Both models beside a scenario: what the seed answers, and what we should.

In:  the config of a scenario and its steps.
Out: for each step `seed` and `ours`, the fields of both answers, and `causes`, the defects that have made a difference.
Law: a model that raises has `error` in its answer and says nothing from then on.
"""

from typing import Any

from contract import range_models
from contract.labels import shortened
from contract.our_model import OurManager
from contract.seed_manager import SeedManager, SeedSequence
from contract.seed_model import NoFreeBlock

Answer = dict[str, Any]
FORECASTS = ("get_needed_blocks_one_step", "get_remaining_blocks_to_completion")


class Models:
    """The seed's and ours, in lockstep."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._seed: SeedManager | None = SeedManager(config)
        self._ours: OurManager | None = OurManager(config)
        self._causes = self._ours.causes

    def after(self, step: dict[str, Any]) -> dict[str, Any]:
        """What rules may use after this step."""
        facts = self._facts(step) if step["op"] in FORECASTS else {}
        seed, ours = _answer(self._seed, step), _answer(self._ours, step)
        if seed.get("error", True):
            self._seed = None
        if ours.get("error", True):
            self._ours = None
        return {"seed": seed, "ours": ours, "causes": sorted(self._causes)} | facts

    def _facts(self, step: dict[str, Any]) -> Answer:
        """What forecasts depend on, as the models have it."""
        if self._seed is None or self._ours is None:
            return {}
        name, window = step["request_id"], step["window"]
        number = [one.window for one in self._ours.windows].index(window)
        one = self._ours.requests[name]
        content = one.content or {}
        added = name in self._ours.tables
        length = one.num_tokens if added else 0
        steps = 2 if step.get("two_steps_look_ahead") else 1
        drafts, new = content.get("draft_len", 0), content.get("max_new_tokens", 0)
        prompt = len(content.get("tokens", ())) or one.num_tokens
        return {
            "prompt": prompt,
            "drafts": drafts,
            "beams": one.beam_width,
            "temporary": self._seed._temporary(self._seed.windows[number]),
            "length": length,
            "next_length": min(length + steps * (drafts + 1), prompt + new),
            "longest": max(window, self._seed.config["max_sequence_length"]),
            "listed": len(self._seed.windows[number].held[name].beams[0]) if added else 0,
            "live": sum(block is not None for block in self._ours.tables[name][number][0]) if added else 0,
            "held_hits": 0 if added else self._held_hits(one, number),
        }

    def _held_hits(self, one: SeedSequence, number: int) -> int:
        assert self._ours is not None
        if not self._ours.config["enable_block_reuse"] or one.content is None:
            return 0
        usable = len(one.tokens) - 1
        nodes = self._ours.ours[number].walk(one.keys(usable, self._ours.size, False), usable)
        return sum(block.refs > 0 for block in nodes)


def _range(model: SeedManager, step: dict[str, Any]) -> Answer:
    if isinstance(model, OurManager):
        return range_models.OURS[step["op"]](model, step)
    return range_models.SEED[step["op"]](model, step)


def _answer(model: SeedManager | None, step: dict[str, Any]) -> Answer:
    if model is None:
        return {}
    try:
        answer = _range(model, step) if step["op"] in range_models.SEED else model.call(step)
    except (NoFreeBlock, RecursionError):  # the seed's tree may have a cycle (D1)
        return {"error": True}
    if answer is None:
        return {"error": False}
    if "events" in answer:
        answer["events"] = shortened(answer["events"])
    return {"error": False} | answer
