"""Prompts that are computed while peers read them.

In:  an instance, the tables of a request at each rank, dice.
Out: what the engine says: opened, advanced, of some prompts layer by layer, then complete or abandoned; now and then
     nothing for a long time. Who was preempted is offered anew when all is computed, or aborted after all.
Law: a rank says so in order, and only after the tokens are in their blocks. What is given up is poison at once, while
     the reactor hears of it a little later: as in a real process, whose threads take turns.
"""

from collections.abc import Callable
from functools import partial
from random import Random

from kv_core.ids import Rank, RequestId, TransferId
from kv_core.spans import Span, ceil_div
from kv_testing.sim.instances import Instance, SimRank
from kv_testing.sim.places import NUM_TOKENS
from kv_transfer.growth import GrowingBook
from kv_transfer.orders import BlockTables, Offer, Tables
from kv_transfer.plan.frontier import Ahead

PREEMPTED = "preempted"
BY_LAYERS = 0.5
"""Chance of a prompt that its layers are told."""
STEP_PARTS = ((0.4, 0.5), (0.8, 1.0))
"""When in a step layers are told, and how many of them."""
TO_REACTOR_S = 0.02
"""How long a call of the engine may wait for the reactor."""


class RankGrowth:
    """One prompt at one rank; every call runs in the rank's process."""

    def __init__(self, rank: SimRank, tables: BlockTables, transfer: int, size: int) -> None:
        self._rank = rank
        self._full = tables
        self._transfer = transfer
        self._size = size
        self._num_computed = 0
        self._book = GrowingBook(rank.copier.places.share.layers)

    def open(self, transfer_id: TransferId, request_id: RequestId, prompt_key: bytes) -> None:
        tables = BlockTables(NUM_TOKENS, self._tables(0))
        offer = Offer(transfer_id, request_id, prompt_key, tables, 0)
        self._rank.copier.begin(self._full)
        self._rank.core.sender.offer(offer, None, self._book.open(offer))
        self._book.check()

    def advance(self, request_id: RequestId, num_computed: int) -> None:
        self._rank.copier.fill(self._full, self._transfer, Span(self._num_computed, num_computed))
        self._num_computed = num_computed
        self._say(request_id, self._tables(num_computed))

    def advance_layers(self, request_id: RequestId, part: float, token_stop: int) -> None:
        """Of the step up to this token so much of the rank's layers is computed."""
        ours = self._rank.copier.places.share.layers
        if layers := Span(ours.start, ours.start + int(part * len(ours))):
            self._rank.copier.fill(self._full, self._transfer, Span(self._num_computed, token_stop), layers)
            self._say(request_id, self._tables(token_stop), Ahead(layers.stop, token_stop))

    def _say(self, request_id: RequestId, tables: Tables, ahead: Ahead | None = None) -> None:
        computed = self._book.advance(request_id, self._num_computed, tables, ahead)
        self._book.check()
        self._rank.core.sender.advance(request_id, computed, tables, None)

    def complete(self, request_id: RequestId) -> None:
        self._book.complete(request_id)
        self._rank.core.sender.complete(request_id)

    def abandon(self, request_id: RequestId, reason: str, dice: Random) -> None:
        why, comes_again = self._book.abandon(request_id, reason), reason == PREEMPTED
        self._rank.copier.begin(self._full)
        sender = self._rank.core.sender
        self._hand_in(TO_REACTOR_S * dice.random(), lambda: sender.abandon(request_id, why, comes_again=comes_again))

    def come_again(self, offer_of: Callable[[BlockTables], Offer], is_open: Callable[[], bool]) -> None:
        """All of it is computed; if it was settled meanwhile, it is offered to nobody."""

        def hand_in() -> None:
            if is_open():
                self._rank.copier.fill(self._full, self._transfer)
                self._rank.core.sender.offer(offer_of(self._full), None)

        self._hand_in(TO_REACTOR_S, hand_in)

    def _hand_in(self, after_s: float, run: Callable[[], None]) -> None:
        process = self._rank.process
        process.clockwork.after(after_s, partial(process.do, run))

    def _tables(self, num_computed: int) -> Tables:
        num_blocks = ceil_div(num_computed, self._size)
        own = sum(block < num_blocks for block in self._rank.copier.places.own_blocks)
        return tuple(table[:own] for table in self._full.by_group)


class Growth:
    """One prompt at all ranks of one run, from its opening to its end."""

    def __init__(self, instance: Instance, request_id: RequestId, transfer: int, dice: Random) -> None:
        self._instance = instance
        self._door = instance.door
        self._request_id = request_id
        self._transfer = transfer
        self._dice = dice
        self._ranks: list[tuple[SimRank, RankGrowth, float]] = []

    def begin(self, transfer_id: TransferId, prompt_key: bytes, tables_at: Callable[[Rank], BlockTables]) -> None:
        """Open it everywhere, and plan what follows."""
        self._offer_of = partial(Offer, transfer_id, self._request_id, prompt_key)
        size = self._instance.state.tokens_per_block
        for rank in self._instance.ranks:
            growth = RankGrowth(rank, tables_at(rank.card.rank), self._transfer, size)
            self._ranks.append((rank, growth, 0.01 * self._dice.random()))
        self._instance.open(transfer_id, self._request_id, prompt_key)
        self._each(0.0, lambda growth: growth.open(transfer_id, self._request_id, prompt_key))
        self._plan()

    def _plan(self) -> None:
        dice, at, num_computed = self._dice, 0.0, 0
        # Dice of its own: the other schedules stay what they are.
        layers = Random(f"layers {self._transfer} {self._request_id} {self._instance.network.clockwork.now}")
        is_by_layers = layers.random() < BY_LAYERS
        gives_up_at = dice.randrange(NUM_TOKENS + 1) if dice.random() < 0.25 else None
        stands_still_at = dice.randrange(NUM_TOKENS) if dice.random() < 0.15 else None
        while num_computed < NUM_TOKENS:
            begun_at = at
            at += dice.expovariate(8)
            if stands_still_at is not None and num_computed >= stands_still_at:
                at, stands_still_at = at + 6 * dice.random(), None
            if gives_up_at is not None and num_computed >= gives_up_at:
                break
            num_computed = min(NUM_TOKENS, num_computed + dice.randint(1, 6))
            for when, part in STEP_PARTS if is_by_layers else ():
                self._by_layers(begun_at + when * (at - begun_at), part, num_computed)
            self._each(at, partial(RankGrowth.advance, request_id=self._request_id, num_computed=num_computed))
        at += dice.expovariate(8)
        if gives_up_at is None:
            self._each(at, lambda growth: growth.complete(self._request_id))
            self._after(at, self._instance.restart_lease)
        else:
            reason = dice.choice((PREEMPTED, "aborted"))
            self._each(at, lambda growth: growth.abandon(self._request_id, reason, dice))
            # Dice of its own: the other schedules stay what they are.
            again = Random(f"what comes again {at}")
            if reason == PREEMPTED:
                at += 0.05 + again.expovariate(2)
            if reason == PREEMPTED and again.random() < 0.7:
                self._each(at, lambda growth: growth.come_again(self._offer_of, self._is_open))
                self._after(at, self._instance.restart_lease)
            else:
                self._after(at, lambda request_id: self._door.resident.withdraw(request_id, "aborted"))  # type: ignore[attr-defined]

    def _by_layers(self, at: float, part: float, token_stop: int) -> None:
        say = partial(RankGrowth.advance_layers, request_id=self._request_id, part=part, token_stop=token_stop)
        self._each(at, say)

    def _is_open(self) -> bool:
        """Whether the engine has not heard of its end."""
        return self._door is self._instance.door and self._request_id in self._instance.unsettled

    def _each(self, at: float, call: Callable[[RankGrowth], None]) -> None:
        """At every rank, each with its own delay: what one rank hears it hears in order."""
        for rank, growth, late_s in self._ranks:
            self._instance.network.clockwork.after(at + late_s, partial(rank.process.do, partial(call, growth)))

    def _after(self, at: float, call: Callable[[RequestId], None]) -> None:
        """At the door."""
        clockwork = self._instance.network.clockwork
        clockwork.after(at + 0.02, partial(self._door.do, partial(call, self._request_id)))
