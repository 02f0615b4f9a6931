"""Layers with windows, as engines keep them: what a window has left behind is a hole on either side."""

from dataclasses import dataclass

import pytest

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.exchanges import hand_over, small_state
from kv_testing.tagged import World, make_world, windows_of
from kv_testing.worlds import ALL, NUM_TOKENS, make_side, sides
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.direct.in_process import InProcessHub
from kv_transfer.orders import BlockTables
from kv_transfer.plan.plan import seen_by_next
from kv_transfer.plan.ranges import HOLE

SLIDING = {"windows": (0, 9, 0, 13)}
CHUNKS = {"windows": (16, 16, 16, 0), "fields": {"chunked": True}}


@dataclass(frozen=True)
class EngineWorld(World):
    """Tables have holes before the block of the scheduler in which a window begins."""

    def tables(self, rank, num_tokens=None):
        whole = super().tables(rank, num_tokens)
        return BlockTables(whole.num_tokens, tuple(map(self._kept, whole.by_group, self._windows(rank))))

    def _windows(self, rank):
        return windows_of(self.state, self.state.share_of(rank))

    def _kept(self, table, window):
        each = self.state.tokens_per_allocation
        first = seen_by_next(ALL, window, chunked=self.state.chunked).start // each * each
        num_left = first // self.state.tokens_per_block
        return (HOLE,) * num_left + table[num_left:]


def engine(state, seed):
    world = make_world(state, NUM_TOKENS, "CBTHD", seed)
    return EngineWorld(world.state, world.caches, world.table, world.num_tokens)


def engines(prefill, decode, is_direct):
    hub, direct = LoopbackHub(), {"direct": InProcessHub().door} if is_direct else {}
    worlds = {"p": engine(prefill, 1), "d": engine(decode, 2)}
    p, d = (make_side(hub, name, world.state, world=world, **direct) for name, world in worlds.items())
    return p, d, sides(p, d)


@pytest.mark.parametrize("kind", [SLIDING, CHUNKS], ids=["sliding", "chunks"])
@pytest.mark.parametrize("tokens", [ALL, Span(36, NUM_TOKENS)], ids=str)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({}, {}),
        ({"tp": 2}, {}),
        ({}, {"tp": 4, "stages": (1, 3)}),
        # The scheduler's blocks are larger than the kernel's; and those of prefill larger than those of decode.
        ({"blocks_per_deal": 2}, {"blocks_per_deal": 2}),
        ({"tokens_per_block": 8}, {}),
        ({"tokens_per_block": 16}, {"blocks_per_deal": 2}),
    ],
)
@pytest.mark.parametrize("is_direct", [False, True], ids=["staged", "direct"])
def test_what_the_next_token_sees_comes_with_the_whole_block_it_begins_in(kind, tokens, prefill, decode, is_direct):
    p, d, running = engines(small_state(**prefill, **kind), small_state(**decode, **kind), is_direct)
    holes = sum(HOLE in table for side in (p, d) for table in side.world.tables(Rank(0)).by_group)
    assert holes > 0, "nothing has moved on"
    with running:
        hand_over(p, d, tokens)
        assert (d.count("bytes_read_directly") > 0) is is_direct


@pytest.mark.parametrize("is_direct", [False, True], ids=["staged", "direct"])
def test_what_the_sender_has_left_behind_is_refused_and_named(is_direct):
    """A block of the decode engine begins before what the prefill engine, with its smaller ones, still has."""
    p, d, running = engines(small_state(**SLIDING), small_state(tokens_per_block=32, **SLIDING), is_direct)
    with running:
        transfer = p.offer()
        d.order(p, transfer)
        outcome = d.outcome(others=[p])
        assert not outcome.ok
        assert "the block table has a hole among these tokens" in outcome.reason
        d.release(p, transfer)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 40])
def test_a_chunk_begins_at_a_multiple_of_its_size(length):
    seen = seen_by_next(Span(0, length), 16, chunked=True)
    assert [token for token in range(length) if token // 16 == length // 16] == list(seen)
