"""A prompt that one side computes while peers may read it.

In:  a Side; how far its engine is.
Out: the calls an engine makes: to its door, and to every rank of the prompt's group.
Law: blocks hold tags for what is computed, layer by layer, and filler elsewhere, so whatever is read too early is seen.
     Tables list no more blocks than are needed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from kv_core.ids import Rank, RequestId, TransferId
from kv_core.spans import Span, ceil_div
from kv_testing.hangs import planted
from kv_testing.tagged import fill
from kv_testing.worlds import FAST, NUM_TOKENS, PROMPT, Side, fresh_id, pair
from kv_transfer.direct.in_process import InProcessHub
from kv_transfer.orders import BlockTables, Offer
from kv_transfer.plan.frontier import Ahead

USUAL: Final = RequestId("p0")
SHORT: Final = replace(FAST, request_deadline_s=1.0)
EVERY_PATH: Final = ("staged", "direct", "in place")


@dataclass
class GrowingPrompt:
    """Of one request."""

    side: Side
    request_id: RequestId = USUAL
    transfer_id: TransferId = field(default_factory=fresh_id)
    num_tokens: int = NUM_TOKENS
    group: int = 0

    @property
    def ranks(self) -> range | tuple[Rank, ...]:
        return self.side.world.state.parallel.ranks_of(self.group)

    def open(self, num_computed: int = 0) -> "GrowingPrompt":
        """Offer it, computed so far."""
        self.compute(num_computed)
        self.side.door.open_offer(self.transfer_id, self.request_id, PROMPT)
        for rank in self.ranks:
            tables = self.tables(rank, num_computed)
            self.side.ranks[rank].offer(Offer(self.transfer_id, self.request_id, PROMPT, tables, num_computed))
        return self

    def compute(self, num_computed: int) -> None:
        """Tokens [0, num_computed) are in the blocks, and nobody is told."""
        fill(self.side.world, Span(0, num_computed), self.group)
        self.side.push()

    def advance(self, num_computed: int) -> None:
        """Compute so far, and say so."""
        self.compute(num_computed)
        for rank in self.ranks:
            self.side.ranks[rank].advance(self.request_id, num_computed, self.tables(rank, num_computed).by_group)

    def advance_layers(self, num_computed: int, ahead: Ahead) -> None:
        """Compute so far, and of the next step so many layers; every rank that has one of them says so."""
        fill(self.side.world, Span(0, ahead.token_stop), self.group, Span(0, ahead.layer_stop))
        self.side.push()
        for rank in self.ranks:
            ours = self.side.world.state.share_of(Rank(rank)).layers
            if layers := ours & Span(0, ahead.layer_stop):
                told = Ahead(layers.stop, ahead.token_stop)
                tables = self.tables(rank, ahead.token_stop).by_group
                self.side.ranks[rank].advance(self.request_id, num_computed, tables, told)

    def complete(self) -> None:
        self.side.door.restart_lease(self.request_id)
        for rank in self.ranks:
            self.side.ranks[rank].complete(self.request_id)

    def abandon(self, reason: str = "preempted") -> None:
        """Give it up, and use its blocks for something else at once."""
        self.give_up(reason)
        self.compute(0)

    def give_up(self, reason: str = "preempted", *, comes_again: bool = False) -> None:
        """Its blocks are left as they are: prompts of one group share theirs. What comes again stays at the door."""
        if not comes_again:
            self.side.door.withdraw_offer(self.request_id, reason)
        for rank in self.ranks:
            self.side.ranks[rank].abandon(self.request_id, reason, comes_again=comes_again)

    def come_again(self) -> None:
        """Computed after all, and offered as any other."""
        self.compute(self.num_tokens)
        self.side.door.restart_lease(self.request_id)
        for rank in self.ranks:
            tables = self.tables(rank, self.num_tokens)
            self.side.ranks[rank].offer(Offer(self.transfer_id, self.request_id, PROMPT, tables))

    def tables(self, rank: int, num_computed: int) -> BlockTables:
        """Of the rank's own blocks those that hold computed tokens."""
        world = self.side.world
        num_blocks = ceil_div(num_computed, world.state.tokens_per_block)
        own = sum(block < num_blocks for block in world.blocks_of(Rank(rank)))
        return BlockTables(self.num_tokens, tuple(table[:own] for table in world.tables(Rank(rank)).by_group))


def world_of(path: str, prefill=None, decode=None, **settings):
    """A pair whose transfers take this path."""
    config = settings.pop("config", FAST)
    if path == "in place":
        config = replace(config, own_blocks=True, in_place_run_bytes=1)
    direct: Callable = InProcessHub().door if path == "direct" else lambda _: None
    return pair(prefill, decode, config=config, direct=direct, **settings)


def steps(*sides) -> None:
    for side in sides:
        side.step()


def arrived(d) -> int:
    """How far the order has come, at its slowest rank."""
    d.step()
    return min((d.arrived.get((rank, "d0"), 0) for rank in range(len(d.ranks))), default=0)


def given_up_while_read(p: Side, d: Side, prompt: GrowingPrompt) -> None:
    """A gather hangs, and reads blocks that are somebody else's by then: nothing of it is written, nothing stays."""
    with planted(p.cores[0].sender.passages._copier, "_parts") as gather:
        gather.hang()
        d.order(p, prompt.transfer_id)
        gather.wait_until_met()
        prompt.abandon("preempted")
    assert "preempted" in d.outcome(others=[p]).reason
    assert (d.misplaced(Span(0, 0)), p.count("bytes_out")) == (0, 0)
    d.check_clean()
    p.check_clean()
