"""What every agent must do, whatever it moves bytes with."""

import random
import threading
import time

import pytest
import torch

from kv_core.errors import CallerError, FerryError
from kv_testing.waiting import wait_for
from kv_transfer.agent.base import Agent, AgentClosed, UnknownPeer
from kv_transfer.agent.cards import AgentCard, RemoteSlice
from kv_transfer.agent.pump import PumpLimits
from kv_transfer.regions import Region, host_region

SMALL_POSTS = PumpLimits(max_post_bytes=4096, max_posts_per_peer=3)
MIB = 1 << 20


class Pair:
    """Two agents that know each other, each with one region: ours filled with 1..250, theirs with 255."""

    def __init__(self, make_agent, num_bytes: int = 1 << 16, limits: PumpLimits | None = None) -> None:
        self.us: Agent = make_agent(None, limits)
        self.them: Agent = make_agent(None, limits)
        self.ours, self.theirs = host_region(num_bytes), host_region(num_bytes)
        self.us.register(self.ours)
        self.them.register(self.theirs)
        self.us.add_peer(self.them.card())
        self.ours.memory.copy_(pattern(num_bytes))
        self.theirs.memory.fill_(255)

    def slices(self, offset: int, num_bytes: int, to: int | None = None):
        return self.ours.slice(offset, num_bytes), self.theirs.slice(offset if to is None else to, num_bytes).remote

    def finish(self, num_tickets: int):
        return collect(self.us, num_tickets)


def pattern(num_bytes: int) -> torch.Tensor:
    return torch.arange(1, 251, dtype=torch.uint8).repeat(num_bytes // 250 + 1)[:num_bytes]


def collect(agent: Agent, num_tickets: int, timeout_s: float = 30.0):
    """Completions of so many tickets, by ticket."""
    found = {}

    def all_there() -> bool:
        found.update({completion.ticket: completion for completion in agent.completions()})
        return len(found) >= num_tickets

    wait_for(all_there, timeout_s, f"{num_tickets} completions")
    return found


@pytest.fixture
def pair(make_agent) -> Pair:
    return Pair(make_agent)


def test_a_write_moves_exactly_these_bytes(make_agent) -> None:
    pair = Pair(make_agent, limits=SMALL_POSTS)
    expected = pair.theirs.memory.clone()
    pairs = []
    # ours:    |0 .. 10000|          |20001 .. 20002|  |30000 .. 38192|
    # theirs:  ..|17 .. 10017|  |12000 .. 12001|   |50000 .. 58192|
    for offset, num_bytes, to in ((0, 10_000, 17), (20_001, 1, 12_000), (30_000, 8192, 50_000)):
        pairs.append(pair.slices(offset, num_bytes, to))
        expected[to : to + num_bytes] = pattern(1 << 16)[offset : offset + num_bytes]
    ticket = pair.us.write(pair.them.name, pairs)
    assert (ticket.peer, ticket.num_bytes) == (pair.them.name, 18_193)
    completion = pair.finish(1)[ticket]
    assert (completion.outcome, completion.reason) == ("done", "")
    assert pair.theirs.memory.equal(expected)
    assert pair.ours.memory.equal(pattern(1 << 16))
    assert pair.them.completions() == []


def test_a_read_moves_exactly_these_bytes(make_agent) -> None:
    pair = Pair(make_agent, limits=SMALL_POSTS)
    pair.ours.memory.fill_(255)
    pair.theirs.memory.copy_(pattern(1 << 16))
    expected = pair.ours.memory.clone()
    expected[33:20_033] = pattern(1 << 16)[40_000:60_000]
    ticket = pair.us.read(pair.them.name, [pair.slices(33, 20_000, 40_000)])
    assert pair.finish(1)[ticket].outcome == "done"
    assert pair.ours.memory.equal(expected)
    assert pair.theirs.memory.equal(pattern(1 << 16))


@pytest.mark.parametrize("seed", range(3))
def test_many_tickets_of_random_parts(make_agent, seed: int) -> None:
    pair = Pair(make_agent, limits=PumpLimits(max_post_bytes=1000))
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, 1 << 16), 99))
    parts = list(zip([0, *cuts], [*cuts, 1 << 16], strict=True))
    draw.shuffle(parts)
    tickets = [
        pair.us.write(pair.them.name, [pair.slices(start, stop - start) for start, stop in parts[i : i + 4]])
        for i in range(0, 100, 4)
    ]
    completions = pair.finish(len(tickets))
    assert [completions[ticket].outcome for ticket in tickets] == ["done"] * 25
    assert pair.theirs.memory.equal(pattern(1 << 16))
    assert pair.us.completions() == []


def test_write_returns_at_once(make_agent) -> None:
    pair = Pair(make_agent, 32 * MIB)
    whole = (pair.ours.whole, pair.theirs.whole.remote)
    began = time.monotonic()
    tickets = [pair.us.write(pair.them.name, [whole]) for _ in range(8)]
    posting_s = time.monotonic() - began
    assert set(pair.finish(8)) == set(tickets)
    assert posting_s < (time.monotonic() - began) / 2


def test_both_sides_write_at_once(pair) -> None:
    pair.them.add_peer(pair.us.card())
    half = 1 << 15
    pair.us.write(pair.them.name, [pair.slices(0, half)])
    pair.them.write(pair.us.name, [(pair.theirs.slice(half, half), pair.ours.slice(half, half).remote)])
    assert [c.outcome for c in (*pair.finish(1).values(), *collect(pair.them, 1).values())] == ["done", "done"]
    assert pair.theirs.memory[:half].equal(pattern(1 << 16)[:half])
    assert (pair.ours.memory[half:] == 255).all()


def test_a_withdrawn_ticket_moves_nothing(make_agent) -> None:
    """Which answer comes depends on how fast the agent is; each must be kept."""
    pair = Pair(make_agent, 32 * MIB, PumpLimits(max_post_bytes=MIB, max_posts_per_peer=1))
    pair.theirs.memory.zero_()
    half = 16 * MIB
    tickets = [pair.us.write(pair.them.name, [pair.slices(0, half)]) for _ in range(8)]
    last = pair.us.write(pair.them.name, [pair.slices(half, half)])
    withdrawn = pair.us.withdraw(last)
    completions = pair.finish(len(tickets) + (not withdrawn))
    assert all(completions[ticket].outcome == "done" for ticket in tickets)
    if withdrawn:
        assert last not in completions
        assert not pair.theirs.memory[half:].any()
    else:
        assert completions[last].reason in ("", "withdrawn")
    time.sleep(0.05)
    assert pair.us.completions() == []


def test_a_finished_ticket_cannot_be_withdrawn(pair) -> None:
    ticket = pair.us.write(pair.them.name, [pair.slices(0, 100)])
    pair.finish(1)
    assert not pair.us.withdraw(ticket)


def test_an_unknown_peer_is_named(pair) -> None:
    with pytest.raises(UnknownPeer, match=f"wanted='nobody', known=.*{pair.them.name}"):
        pair.us.write("nobody", [pair.slices(0, 10)])
    pair.us.remove_peer(pair.them.name)
    pair.us.remove_peer(pair.them.name)
    with pytest.raises(UnknownPeer, match="known=\\[\\]"):
        pair.us.write(pair.them.name, [pair.slices(0, 10)])


def test_a_removed_peer_can_come_back(pair) -> None:
    pair.us.write(pair.them.name, [pair.slices(0, 10)])
    pair.finish(1)
    pair.us.remove_peer(pair.them.name)
    pair.us.add_peer(pair.them.card())
    ticket = pair.us.write(pair.them.name, [pair.slices(10, 10)])
    assert pair.finish(1)[ticket].outcome == "done"
    assert pair.theirs.memory[:20].equal(pattern(20))


def test_slices_outside_a_region_are_named(pair) -> None:
    with pytest.raises(CallerError, match=r"slice=\[65530, 65540\), region=\[0, 65536\)"):
        pair.ours.slice(65_530, 10)
    past = RemoteSlice(address=pair.theirs.address + 65_530, num_bytes=10, kind="host", device_id=0)
    ticket = pair.us.write(pair.them.name, [(pair.ours.slice(0, 10), past)])
    completion = pair.finish(1)[ticket]
    assert completion.outcome == "error"
    assert f"{past.address:#x}" in completion.reason
    assert (pair.theirs.memory == 255).all()
    # The agent goes on.
    assert pair.us.write(pair.them.name, [pair.slices(0, 10)]) in pair.finish(1)


def test_pairs_must_fit_and_regions_be_registered(pair) -> None:
    stranger = host_region(100)
    refused = [
        ([], "at least one pair"),
        ([(pair.ours.slice(0, 10), pair.theirs.slice(0, 11).remote)], "ours=10, theirs=11"),
        ([(stranger.slice(0, 10), pair.theirs.slice(0, 10).remote)], "not registered"),
    ]
    for pairs, message in refused:
        with pytest.raises(CallerError, match=message):
            pair.us.write(pair.them.name, pairs)
    assert pair.us.completions() == []


def test_registering(pair) -> None:
    more = host_region(100)
    with pytest.raises(CallerError, match="not registered"):
        pair.us.deregister(more)
    with pytest.raises(CallerError, match="registered once"):
        pair.us.register(pair.ours)
    pair.us.register(more)
    ticket = pair.us.write(pair.them.name, [(more.slice(0, 50), pair.theirs.slice(0, 50).remote)])
    assert pair.finish(1)[ticket].outcome == "done"
    pair.us.deregister(more)
    with pytest.raises(CallerError, match="not registered"):
        pair.us.write(pair.them.name, [(more.slice(0, 50), pair.theirs.slice(0, 50).remote)])


def test_a_region_in_use_stays_registered(make_agent) -> None:
    pair = Pair(make_agent, 64 * MIB, PumpLimits(max_post_bytes=MIB, max_posts_per_peer=1))
    pair.us.write(pair.them.name, [pair.slices(0, 64 * MIB)])
    with pytest.raises(CallerError, match="may be moving"):
        pair.us.deregister(pair.ours)
    pair.finish(1)
    pair.us.deregister(pair.ours)


def test_a_peer_may_add_regions_later(pair) -> None:
    more = host_region(100)
    pair.them.register(more)
    pair.us.add_peer(pair.them.card())
    pair.us.add_peer(pair.them.card())
    ticket = pair.us.write(pair.them.name, [(pair.ours.slice(0, 100), more.whole.remote)])
    assert pair.finish(1)[ticket].outcome == "done"
    assert more.memory.equal(pattern(100))


def test_a_peer_of_the_same_name_replaces_the_dead_one(make_agent) -> None:
    us = make_agent()
    ours = host_region(16 * MIB)
    us.register(ours)
    ours.memory.copy_(pattern(16 * MIB))

    def incarnation() -> tuple[Agent, Region]:
        agent, region = make_agent("the same name"), host_region(16 * MIB)
        agent.register(region)
        us.add_peer(agent.card())
        return agent, region

    first, first_region = incarnation()
    early = [us.write("the same name", [(ours.whole, first_region.whole.remote)]) for _ in range(20)]
    first.close(5)
    _, second_region = incarnation()
    late = us.write("the same name", [(ours.whole, second_region.whole.remote)])
    completions = collect(us, 21)
    assert {completions[ticket].outcome for ticket in early} <= {"done", "error"}
    assert completions[late].outcome == "done"
    assert second_region.memory.equal(ours.memory)


def test_cards_of_others_are_checked(pair) -> None:
    card = pair.them.card()
    with pytest.raises(CallerError, match="ours='.*', theirs='carrier pigeon'"):
        pair.us.add_peer(AgentCard(kind="carrier pigeon", name="x", blob=card.blob))
    with pytest.raises(CallerError, match="our own name"):
        pair.us.add_peer(pair.us.card())
    for blob in (b"", b"garbage", card.blob[:-1], card.blob[:-1] + bytes([card.blob[-1] ^ 1])):
        with pytest.raises(CallerError, match="blob"):
            pair.us.add_peer(AgentCard(kind=card.kind, name="x", blob=blob))
    with pytest.raises(UnknownPeer):
        pair.us.write("x", [pair.slices(0, 1)])


def test_names_are_of_one_incarnation(make_agent) -> None:
    first, second = make_agent(), make_agent()
    assert first.name != second.name
    assert first.kind == second.kind
    assert first.card().name == first.name
    assert first.card().kind == first.kind


def test_the_waker_is_called_when_completions_wait(pair) -> None:
    woken, threads = threading.Event(), []

    def waker() -> None:
        threads.append(threading.current_thread())
        woken.set()

    pair.us.on_completion(waker)
    for _ in range(20):
        woken.clear()
        pair.us.write(pair.them.name, [pair.slices(0, 1000)])
        assert woken.wait(20)
        assert len(pair.us.completions()) == 1
    assert threading.current_thread() not in threads
    assert len(set(threads)) == 1


def test_closing_with_work_in_flight_ends_every_ticket(make_agent) -> None:
    pair = Pair(make_agent, 32 * MIB, PumpLimits(max_post_bytes=MIB))
    tickets = [pair.us.write(pair.them.name, [pair.slices(0, 32 * MIB)]) for _ in range(20)]
    began = time.monotonic()
    assert pair.us.close(10)
    assert time.monotonic() - began < 12
    completions = {completion.ticket: completion for completion in pair.us.completions()}
    assert set(completions) == set(tickets)
    assert {completion.reason for completion in completions.values()} <= {"", "agent closed"}
    with pytest.raises(AgentClosed, match="it was closed"):
        pair.us.write(pair.them.name, [pair.slices(0, 1)])
    with pytest.raises(FerryError):
        pair.us.register(host_region(10))


def test_a_write_to_an_agent_that_was_closed_ends(pair) -> None:
    pair.us.write(pair.them.name, [pair.slices(0, 10)])
    pair.finish(1)
    pair.them.close(5)
    ticket = pair.us.write(pair.them.name, [pair.slices(0, 10)])
    pair.us.remove_peer(pair.them.name)
    assert pair.finish(1)[ticket].outcome in ("error", "done")
