"""One schedule: a world, its weather and what happens in it, all from one seed.

In:  a seed.
Out: `run`, which plays the schedule and raises Violation if a law is broken; Played, what happened.
Law, safety: each order has one outcome at each rank; what is reported as received is right, each element moved once.
Law: nobody is told that a prompt is gone which comes again.
Law, liveness: each order is reported by its deadline or, where its process stood still, soon after it goes on; once all
     have gone on or died nothing is open and no timer but the clockwork's own is left; then a request between any
     two instances succeeds.
"""

import gc
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from random import Random

from kv_core.ids import RequestId
from kv_core.spans import Span
from kv_testing.sim.clockwork import Clockwork, Process, Violation, check
from kv_testing.sim.growth import Growth
from kv_testing.sim.instances import Instance
from kv_testing.sim.network import Network
from kv_testing.sim.places import NUM_TOKENS, state_of
from kv_testing.sim.requests import PROMPT, Request
from kv_testing.sim.rest import wait_until_idle
from kv_testing.sim.weather import draw_weather
from kv_transfer.config import TransferConfig
from kv_transfer.orders import Offer, Received, ReceiveOrder, Settled
from kv_transfer.plan.context import ContextCut
from kv_transfer.protocol.messages import Release, Renew

DEADLINE_S, LEASE_S = 4.0, 5.0
SLACK_S = 3.0
"""Copies that are queued or running when a deadline passes."""
FAILING = 0.06
"""Chance of a rank that the thread of its agent fails."""
GROWING = 0.3
"""Chance of a prompt that it is offered before it is computed."""
SHAPES = [(1, (2,), 1), (2, (2,), 1), (3, (2,), 1), (1, (2,), 2), (1, (1, 1), 1), (2, (1, 1), 1), (4, (2,), 1)]
"""Tensor ranks, layers of each stage, context ranks."""
WINDOWS: list[tuple[int, ...]] = [(), (), (), (0, 5), (4, 4), (5, 0)]
USUAL_CONFIG = {
    "request_deadline_s": DEADLINE_S,
    "lease_s": LEASE_S,
    "release_deadline_s": 8.0,
    "peer_timeout_s": 0.8,
    "nudge_s": 0.3,
    "nudge_limit_s": 1.2,
    "chunk_bytes": 4096,
    "unmap_idle_s": 2.0,
}


@dataclass(frozen=True)
class Played:
    """What a schedule came to."""

    num_events: int
    outcomes: Counter[str]
    num_landed_late: int
    ended_at: float


class World:
    """The instances, the requests, and the laws about them."""

    def __init__(self, seed: int, **settings: object) -> None:
        self.dice = dice = Random(seed)
        # Dice of its own: schedules in which no thread fails are the same with and without this fault.
        self.ill = Random(f"threads that fail {seed}")
        self.growth = Random(f"prompts that are computed meanwhile {seed}")
        self.clockwork = Clockwork(dice, draw_weather(dice))
        self.network = Network(self.clockwork)
        arena = 4096 * dice.choice((1, 2, 3, 8))
        chunk = dice.choice((64, 128, 4096))
        layers = Random(f"chunks that are cut by layers {seed}")
        config = TransferConfig(
            **USUAL_CONFIG
            | {
                "send_arena_bytes": 4096 * dice.choice((1, 2, 4)),
                "receive_arena_bytes": arena,
                "chunk_bytes": chunk,
                "chunks_in_flight": dice.choice((1, 2, 4)),
                "layers_per_chunk": layers.choice((0, 1)),
            }
            | settings  # type: ignore[arg-type]
        )
        self.windows = dice.choice(WINDOWS)
        self.prefills = [self._instance(f"p{number}", config) for number in range(dice.choice((1, 1, 2)))]
        self.decodes = [self._instance(f"d{number}", config) for number in range(dice.choice((1, 1, 2)))]
        self.requests: list[Request] = []
        self._sent: set[tuple[str, int, RequestId]] = set()
        self.outcomes: Counter[str] = Counter()

    @property
    def instances(self) -> list[Instance]:
        return self.prefills + self.decodes

    def play(self) -> Played:
        """All of it."""
        self._plan()
        calm_at = self.clockwork.weather.calm_at
        self.clockwork.run_until(calm_at)
        self._settle_down()
        wait_until_idle(self.clockwork, self.instances, self.requests, "after the storm")
        self._next_request()
        wait_until_idle(self.clockwork, self.instances, self.requests, "after the next request")
        return Played(self.clockwork.num_events, self.outcomes, self.network.num_landed_late, self.clockwork.now)

    # -- what happens ------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        dice, after = self.dice, self.clockwork.after
        for number in range(dice.choice((1, 2, 2, 3, 5))):
            request = self._request(number)
            request.is_growing = self.growth.random() < GROWING
            start = 2.0 * dice.random() ** 2
            after(start, partial(self._order, request))
            if dice.random() < 0.95:
                late_s = dice.choice((-0.5, -0.05, 0.0, 0.02, 1.0, 5.0)) if dice.random() < 0.4 else 0.0
                after(max(0.0, start + late_s), partial(self._offer, request))
            if dice.random() < 0.15:
                after(start + dice.expovariate(8), partial(self._abort, request))
            if dice.random() < 0.1:
                after(start + dice.expovariate(8), partial(self._withdraw, request))
        for instance in self.instances:
            if dice.random() < 0.25:
                after(2.5 * dice.random() ** 2, partial(self._crash, instance))
            for process in instance.processes:
                if dice.random() < 0.15:
                    self._plan_stop(process)

        self._plan_failing_threads()

    def _plan_failing_threads(self) -> None:
        """The thread of an agent ends, and its process lives on until it is begun anew after the storm."""
        for rank in (rank for instance in self.instances for rank in instance.ranks):
            if self.ill.random() < FAILING:
                rank.agent.plan_failure(2.5 * self.ill.random() ** 2, self.ill)

    def _plan_stop(self, process: Process) -> None:
        at, for_s = 2.5 * self.dice.random() ** 2, self.dice.choice((0.3, 1.0, 3.0, 6.0))
        self.clockwork.after(at, process.stop)
        self.clockwork.after(at + for_s, lambda: process.resume() if process.is_stopped else None)

    def _request(self, number: int) -> Request:
        start = self.dice.choice((0, 0, 1, 5))
        prefill, decode = self.dice.choice(self.prefills), self.dice.choice(self.decodes)
        request = Request(number, prefill, decode, Span(start, self.dice.randint(start + 1, NUM_TOKENS)))
        self.requests.append(request)
        return request

    def _offer(self, request: Request) -> None:
        if not request.prefill.is_whole:
            return
        if request.is_growing:
            growth = Growth(request.prefill, request.request_id, request.number, self.growth)
            growth.begin(request.transfer_id, PROMPT, partial(request.tables, request.prefill))
            return
        offer_at = lambda rank: Offer(  # noqa: E731
            request.transfer_id, request.request_id, PROMPT, request.tables(request.prefill, rank)
        )
        request.prefill.offer(offer_at, request.number)

    def _order(self, request: Request) -> None:
        decode = request.decode
        if not decode.is_whole:
            return
        request.run = decode.num_runs
        host, port = request.prefill.address
        wanted = request.prefill.incarnation if self.dice.random() < 0.7 else None
        name, transfer = request.request_id, request.transfer_id
        if self.dice.random() < 0.5:
            hold = Renew(transfer_id=transfer, prompt_key=PROMPT, consumer=request.consumer, incarnation=None)
            decode.door.do(partial(decode.porter.releaser.hold, (host, port), hold))
        for number in range(len(decode.ranks)):
            tables = request.tables(decode, number)
            order = ReceiveOrder(name, transfer, PROMPT, request.tokens, tables, host, port, wanted)
            request.ordered[number] = float("inf")
            decode.order(number, order, partial(self._began, request, number))

    def _began(self, request: Request, number: int) -> None:
        request.ordered[number] = self.clockwork.now

    def _abort(self, request: Request) -> None:
        for rank in request.decode.ranks:
            rank.process.do(partial(rank.core.loads.abort, request.request_id))

    def _withdraw(self, request: Request) -> None:
        instance = request.prefill
        instance.door.do(lambda: instance.porter.withdraw(request.request_id, "aborted"))

    def _crash(self, instance: Instance) -> None:
        """One process dies, the engine ends the others, and perhaps begins anew."""
        if not instance.is_whole:
            return
        self.dice.choice(instance.processes).die()
        self.clockwork.after(0.5 * self.dice.random(), lambda: self._end(instance, instance.num_runs))
        if self.dice.random() < 0.7:
            self.clockwork.after(0.5 + 2 * self.dice.random(), lambda: self._restart(instance))

    def _end(self, instance: Instance, run: int) -> None:
        if instance.num_runs == run:
            for process in instance.processes:
                process.die()

    def _restart(self, instance: Instance) -> None:
        if not instance.is_whole:
            for process in instance.processes:
                process.die()
            instance.start()

    # -- what is told ------------------------------------------------------------------------------------------------

    def _on_received(self, instance: Instance, number: int, received: Received) -> None:
        request = next(each for each in self.requests if each.request_id == received.request_id)
        check(number not in request.outcomes, "an order is reported twice:", request.request_id, number)
        request.outcomes[number] = received
        rank = instance.ranks[number]
        latest = max(request.ordered[number] + DEADLINE_S, rank.process.resumed_at) + SLACK_S
        check(self.clockwork.now <= latest, "an order outlives its deadline:", request.request_id, number)
        check("is gone: preempted" not in received.reason, "what comes again is told to be gone:", received)
        tables = request.tables(instance, number)
        if received.ok:
            rank.copier.check_loaded(tables, request.tokens, request.number, why=f"{request.request_id} rank {number}")
        rank.copier.writable.discard(tables)
        self.outcomes["ok" if received.ok else "failed"] += 1
        if len(request.outcomes) == len(instance.ranks):
            self._release(request)

    def _on_arrived(self, instance: Instance, number: int, request_id: RequestId, stop: int) -> None:
        request = next(each for each in self.requests if each.request_id == request_id)
        check(number not in request.outcomes, "an order has come further after its end:", request_id, number)
        tables, why = request.tables(instance, number), f"{request_id} rank {number}"
        instance.ranks[number].copier.check_arrived(tables, request.tokens, stop, request.number, why=why)

    def _release(self, request: Request) -> None:
        decode, prefill = request.decode, request.prefill
        message = Release(
            transfer_id=request.transfer_id,
            prompt_key=PROMPT,
            consumer=request.consumer,
            incarnation=None,
        )
        decode.door.do(lambda: decode.porter.releaser.release(prefill.address, message))

    def _on_sent(self, instance: Instance, number: int, request_id: RequestId) -> None:
        name = (f"{instance.incarnation}", number, request_id)
        check(name not in self._sent, "a request is reported as sent twice:", name)
        self._sent.add(name)
        request = next(each for each in self.requests if each.request_id == request_id)
        instance.ranks[number].copier.poison(request.tables(instance, number))

    def _on_settled(self, instance: Instance, settled: Settled) -> None:
        instance.pass_on(settled)

    # -- after the storm ---------------------------------------------------------------------------------------------

    def _settle_down(self) -> None:
        """Whoever stood still goes on; whoever is half dead begins anew."""
        for instance in self.instances:
            for process in instance.processes:
                if process.is_stopped:
                    process.resume()
            for rank in instance.ranks:
                if rank.agent.pulse.failure:
                    rank.process.die()
            self._restart(instance)

    def _next_request(self) -> None:
        request = self._request(len(self.requests))
        self._offer(request)
        self._order(request)
        self.clockwork.run_until(self.clockwork.now + DEADLINE_S + SLACK_S)
        outcomes = list(request.outcomes.values())
        check(len(outcomes) == len(request.decode.ranks), "the next request is not answered")
        check(all(each.ok for each in outcomes), "the next request fails:", outcomes)

    def _instance(self, name: str, config: TransferConfig) -> Instance:
        tp, stages, cp = self.dice.choice(SHAPES[:4] if self.dice.random() < 0.8 else SHAPES)
        cut: ContextCut = self.dice.choice(("contiguous", "round_robin"))
        state = state_of(tp, stages, self.dice.choice((2, 4, 12)), cp, cut, self.windows)
        made = Instance(self.network, name, state, config, is_mappable=self.dice.random() < 0.6)
        made.on_received, made.on_sent, made.on_settled = self._on_received, self._on_sent, self._on_settled
        made.on_arrived = self._on_arrived
        return made


def run_all(seeds: Iterable[int], **settings: object) -> list[Played]:
    """Play many schedules.

    A world is full of cycles, and all of it is dead once it has been played: looking for garbage at any other time, or
    among what was there before, would take a sixth of the time.
    """
    gc.disable()
    try:
        return [_run_alone(seed, **settings) for seed in seeds]
    finally:
        gc.unfreeze()
        gc.enable()


def _run_alone(seed: int, **settings: object) -> Played:
    gc.collect()
    gc.freeze()
    return run(seed, **settings)


def run(seed: int, **settings: object) -> Played:
    """Play the schedule of this seed; a Violation names the seed."""
    try:
        return World(seed, **settings).play()
    except Exception as error:
        raise Violation(f"seed {seed}: {type(error).__name__}: {error}") from error
