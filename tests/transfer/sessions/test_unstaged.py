"""What both ways to read blocks where they lie must do: mapped by the receiver (direct), or by its agent (in place).

What is special to one of them is in `test_direct.py` and `test_in_place.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import pytest

from kv_core.spans import Span
from kv_testing.exchanges import hand_over
from kv_testing.layouts import make_state, random_pair
from kv_testing.waiting import wait_for
from kv_testing.worlds import ALL, FAST, NUM_TOKENS, Switches, make_side, pair, sides, state_of
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.config import TransferConfig
from kv_transfer.direct.book import BookReader
from kv_transfer.direct.in_process import InProcessCaches, InProcessDoor, InProcessHub
from kv_transfer.in_place.caches import SharedCaches
from kv_transfer.orders import BlockTables
from kv_transfer.plan.cache_state import ParallelLayout
from kv_transfer.plan.ranges import HOLE


@dataclass(frozen=True)
class Way:
    """How blocks are read; `owner` makes the card, `fail` makes the next read of a world fail for `reason`."""

    decode: TransferConfig
    prefill: TransferConfig
    direct: Callable[..., object]
    counter: str
    owner: type
    fail: Callable[..., object]
    reason: str
    num_open: Callable[[], int] = lambda: 0

    def pair(self, prefill=None, decode=None, **faults):
        return pair(prefill, decode, config=self.decode, prefill_config=self.prefill, direct=self.direct, **faults)


def fail_mapped(patch, d, hub):
    patch.setattr(InProcessCaches, "read", lambda self, what, into: 1 / 0)


def fail_agent(patch, d, hub):
    hub.fail(d.agents[0].name)


@pytest.fixture(params=["direct", "in place"])
def way(request):
    if request.param == "direct":
        doors = InProcessHub()
        return Way(
            FAST, FAST, doors.door, "bytes_read_directly", InProcessDoor, fail_mapped,
            "could not be read: division by zero", lambda: doors.num_open,
        )  # fmt: skip
    return Way(
        replace(FAST, own_blocks=True, in_place_run_bytes=1), replace(FAST, share_in_place=True), lambda _: None,
        "bytes_read_in_place", SharedCaches, fail_agent,
        "could not be read in place: a test wants this post to fail",
    )  # fmt: skip


def windowed(tp=1, **cut):
    parallel = ParallelLayout.even(tp, [4], 4, **cut)
    return make_state(dtype="float32", head_size=4, tokens_per_block=4, windows=(0, 9, 0, 9), parallel=parallel)


SHAPES = {
    "tp1-tp1": (state_of(), state_of()),
    "tp2-tp1": (state_of(2), state_of(1)),
    "tp3-pp13": (state_of(3), state_of(stages=(1, 3))),
    "token major": (state_of(2, order="token_major"), state_of(order="token_major")),
    "other blocks": (state_of(tokens_per_block=4), state_of(tokens_per_block=8, order="token_major")),
    "smaller blocks": (state_of(tokens_per_block=16), state_of(2, tokens_per_block=4)),
    "windows, cp": (windowed(cp=2, context_cut="round_robin"), windowed(2)),
}


@pytest.mark.parametrize("tokens", [ALL, Span(7, 33), Span(39, 40)], ids=str)
@pytest.mark.parametrize(("prefill", "decode"), SHAPES.values(), ids=SHAPES)
def test_blocks_of_any_shape_are_read_where_they_lie(way, prefill, decode, tokens):
    with way.pair(prefill, decode) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer, tokens=tokens)
        received = d.outcomes(others=[p])
        assert all(each.ok for each in received), received
        assert d.misplaced(tokens) == 0
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()
        assert d.count(way.counter) == sum(each.num_bytes for each in received) > 0
        assert p.count("bytes_out") == 0, "nothing is gathered, nothing written"
    assert way.num_open() == 0


@pytest.mark.drawn
@pytest.mark.parametrize("seed", [seed for seed in range(60) if random_pair(seed).tokens][:12])
def test_drawn_pairs_are_read_as_they_are_sent(way, seed):
    drawn, hub = random_pair(seed), LoopbackHub()
    config, length = replace(way.decode, chunk_bytes=None), drawn.tokens.stop
    p, d = (
        make_side(hub, name, state, config, num_tokens=length, direct=way.direct)
        for name, state in (("p", drawn.sender), ("d", drawn.receiver))
    )
    with sides(p, d):
        transfer = p.offer(num_tokens=length, group=drawn.sender_group)
        d.order(p, transfer, tokens=drawn.tokens, from_group=drawn.sender_group, to_group=drawn.receiver_group)
        assert all(each.ok for each in d.outcomes(others=[p]))
        start = drawn.tokens.start // drawn.sender.tokens_per_unit * drawn.sender.tokens_per_unit
        assert d.misplaced(Span(start, length)) == 0
        d.release(p, transfer)
        d.check_clean()


def test_a_card_too_long_to_be_told_leaves_all_to_staging(way, monkeypatch):
    card = way.owner.card
    monkeypatch.setattr(way.owner, "card", lambda self: msgspec.structs.replace(card(self), blob=bytes(5000)))
    decode, prefill = (replace(config, max_message_bytes=4096) for config in (way.decode, way.prefill))
    short = replace(way, decode=decode, prefill=prefill)
    with short.pair() as (p, d, _):
        hand_over(p, d)
        assert (d.count(way.counter), p.count("internal_errors")) == (0, 0)
        assert p.count("bytes_out") > 0


def test_a_read_that_fails_is_told_and_costs_nothing_else(way, monkeypatch):
    with way.pair(state_of(2)) as (p, d, hub):
        with monkeypatch.context() as patch:
            way.fail(patch, d, hub)
            transfer = p.offer("bad")
            d.order(p, transfer, "bad")
            received = d.outcome("bad", others=[p])
            assert way.reason in received.reason
            d.release(p, transfer, "bad")
        hand_over(p, d, name="good")


def test_a_hole_is_never_read(way):
    with way.pair(windowed(), windowed()) as (p, d, _):
        full, window = p.world.tables(0).by_group
        tables = BlockTables(NUM_TOKENS, (full, (HOLE,) * 9 + window[9:]))
        offer = replace(p.make_offer(), tables=tables)
        p.door.open_offer(offer.transfer_id, offer.request_id, offer.prompt_key)
        p.ranks[0].offer(offer)
        d.order(p, offer.transfer_id)
        received = d.outcome(others=[p])
        assert "hole among these tokens" in received.reason
        assert d.misplaced(Span(0, 0)) == 0, "what does not fit is found before anything is written"


@pytest.mark.parametrize("lost", ["Ready", "Close", "Quiet"])
def test_lost_messages_are_said_again(way, lost, monkeypatch):
    """Of a reader that cannot see what is offered; one that can needs none of them (test_told.py)."""
    monkeypatch.setattr(BookReader, "find", lambda *_: None)
    switches = Switches(dropped={lost})
    with way.pair(prefill_faults=switches, decode_faults=switches) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        wait_for(lambda: switches.num_said[lost] >= 2, 10, f"{lost} again")
        d.step()
        assert d.received == [], "nothing counts before it is proven"
        switches.dropped = set()
        assert d.outcome(others=[p]).ok
        assert d.misplaced() == 0
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()
