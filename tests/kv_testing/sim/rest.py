"""What must hold once a storm is over.

In:  the instances, whose processes all go on or have begun anew; the requests.
Out: a clock that stands where everything has come to rest; a Violation if that takes too long.
Law: each order of a living run was reported; nothing is open, nobody is mapped and no timer but the clockwork's own is
     left; books and arenas keep their laws.
"""

from collections.abc import Iterator, Sequence

from kv_testing.sim.clockwork import Clockwork, check
from kv_testing.sim.instances import Instance, SimRank
from kv_testing.sim.requests import Request

QUIET_S = 60.0
"""Far more than anything needs to end in calm weather."""
TIMERS_S = 15.0
"""More than the longest pause of anything that ends by itself."""
NUM_TIMERS = 3
"""Of a rank at rest: the watches for peers and for threads, the status."""


def wait_until_idle(
    clockwork: Clockwork, instances: Sequence[Instance], requests: Sequence[Request], when: str
) -> None:
    """Let everything end."""
    end = clockwork.now + QUIET_S
    while found := _open(instances):
        check(clockwork.now < end, f"still open {when}:", found)
        clockwork.run_until(clockwork.now + 0.5)
    for request in requests:
        if request.run == request.decode.num_runs:
            check(len(request.outcomes) == len(request.ordered), "an order was never reported:", request)
    for rank in _ranks(instances):
        rank.core.sender.offers.check()
        for arena in rank.arenas:
            arena.check()
        check(not rank.process.counters["internal_errors"], "an error of our own")
    _wait_until_no_timer(clockwork, instances, when)
    mapped = [len(rank.core.loads.receiver.mappings) for rank in _ranks(instances)]
    check(not any(mapped), "peers are still mapped:", mapped)


def _wait_until_no_timer(clockwork: Clockwork, instances: Sequence[Instance], when: str) -> None:
    """Some end by themselves: the alarm of a quarantine, a greeting, a question that nobody waits for."""
    end = clockwork.now + TIMERS_S
    while found := [timer for rank in _ranks(instances) for timer in _timers(rank)]:
        check(clockwork.now < end, f"timers are left {when}:", found)
        clockwork.run_until(clockwork.now + 1.0)


def _timers(rank: SimRank) -> list[str]:
    """Live timers of a rank that is not at rest."""
    timers = [timer for _, _, timer in rank.process.timers._heap if timer.is_live]
    return [str(timer._run) for timer in timers] if len(timers) > NUM_TIMERS else []


def _open(instances: Sequence[Instance]) -> dict[str, dict[str, int]]:
    found = {instance.name: instance.porter.status().open for instance in instances}
    for instance in instances:
        for number, rank in enumerate(instance.ranks):
            found[f"{instance.name}/{number}"] = rank.core.measure().open
    return {name: gauges for name, gauges in found.items() if gauges}


def _ranks(instances: Sequence[Instance]) -> Iterator[SimRank]:
    return (rank for instance in instances for rank in instance.ranks)
