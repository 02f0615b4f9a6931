"""Jobs of the tiers that workers have not answered yet.

In:  orders, each with what is to happen at its end; the answers of the ranks, step by step.
Out: the orders of a step; the ends, each called once, when the last rank has answered.
"""

from collections.abc import Callable, Mapping

from kv_engine_adapter.tier_orders import Job, JobId, Tally, TierOrders, joined

End = Callable[[int], None]
"""Told up to which token the job went well on all ranks."""


class Jobs:
    """The open jobs of one engine."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._next = 0
        self._ordered: list[Job] = []
        self._ends: dict[JobId, End] = {}
        self._tallies: dict[JobId, Tally] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def new(self, end: End) -> JobId:
        """A job whose order will follow."""
        job, self._next = JobId(self._next), self._next + 1
        self._ends[job] = end
        return job

    def order(self, job: Job, end: End | None = None) -> None:
        """To be obeyed in the next step; with another end than it had, if one is given."""
        self._ordered.append(job)
        if end is not None:
            self._ends[job.job] = end

    def drop(self, job: JobId) -> None:
        """Of this job nobody will be told."""
        del self._ends[job]

    def take_orders(self) -> TierOrders:
        """The orders since the last call."""
        ordered, self._ordered = tuple(self._ordered), []
        return TierOrders(ordered)

    @property
    def has_orders(self) -> bool:
        return bool(self._ordered)

    def answered(self, tallies: Mapping[JobId, Tally]) -> None:
        """What ranks answered in a step."""
        self._tallies = joined(self._tallies, tallies)
        for job in tallies:
            tally = self._tallies[job]
            if tally.num_ranks >= self._num_ranks:
                del self._tallies[job]
                self._ends.pop(job)(tally.num_tokens)
