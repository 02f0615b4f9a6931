"""Both models beside a scenario: what the seed answers, and what we should.

In:  the config of a scenario and its steps.
Out: for each step `seed` and `ours`, the fields of both answers, and `causes`, the defects that have made a difference.
Law: a model that raises has `error` in its answer and says nothing from then on.
"""

from typing import Any

from contract import range_models
from contract.labels import shortened
from contract.our_model import OurManager
from contract.seed_manager import SeedManager
from contract.seed_model import NoFreeBlock

Answer = dict[str, Any]


class Models:
    """The seed's and ours, in lockstep."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._seed: SeedManager | None = SeedManager(config)
        self._ours: OurManager | None = OurManager(config)
        self._causes = self._ours.causes

    def after(self, step: dict[str, Any]) -> dict[str, Any]:
        """What rules may use after this step."""
        seed, ours = _answer(self._seed, step), _answer(self._ours, step)
        if seed.get("error", True):
            self._seed = None
        if ours.get("error", True):
            self._ours = None
        return {"seed": seed, "ours": ours, "causes": sorted(self._causes)}


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
