"""What a test can make go wrong with loopback agents."""

import time

import pytest

from kv_testing.waiting import wait_for
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.agent.pump import PumpLimits
from kv_transfer.regions import host_region

N = 4096


class World:
    """Agents p and q (writers) and d; posts of 1 KiB, so that a whole region is four posts."""

    def __init__(self) -> None:
        self.hub = LoopbackHub()
        limits = PumpLimits(max_post_bytes=1024, max_posts_per_peer=2)
        self.agents = {name: self.hub.agent(name, limits) for name in "pqd"}
        self.regions = {name: host_region(N, pinned=False) for name in "pqd"}
        for name, agent in self.agents.items():
            agent.register(self.regions[name])
            self.regions[name].memory.fill_(ord(name))
        for name in "pq":
            self.agents[name].add_peer(self.agents["d"].card())

    def write(self, source: str, num_bytes: int = N):
        return self.agents[source].write(
            "d", [(self.regions[source].slice(0, num_bytes), self.regions["d"].slice(0, num_bytes).remote)]
        )

    def landed(self, source: str) -> int:
        return int((self.regions["d"].memory == ord(source)).sum())

    def one(self, source: str):
        (completion,) = wait_for(self.agents[source].completions)
        return completion


@pytest.fixture
def world():
    made = World()
    yield made
    for agent in made.agents.values():
        agent.close(0)


@pytest.mark.parametrize("side", ["p", "d"])
def test_nothing_moves_while_a_side_is_stopped(world, side: str) -> None:
    world.hub.stop(side)
    ticket = world.write("p")
    time.sleep(0.1)
    assert world.agents["p"].completions() == []
    assert world.landed("p") == 0
    world.hub.resume(side)
    assert (world.one("p").ticket, world.landed("p")) == (ticket, N)


def test_a_stopped_side_does_not_stop_others(world) -> None:
    world.hub.stop("p")
    world.write("p")
    world.write("q")
    assert world.one("q").outcome == "done"
    assert world.landed("q") == N


def test_a_ticket_not_posted_is_withdrawn_and_never_moves(world) -> None:
    world.hub.stop("d")
    # Nothing is posted in between: so one post of the first and one of the second are open, which is the limit.
    with world.agents["p"]._wake:
        first, second, third = world.write("p"), world.write("p"), world.write("p")
    wait_for(lambda: len(world.agents["p"]._posts) == 2, what="two open posts")
    assert world.agents["p"].withdraw(third)
    assert not world.agents["p"].withdraw(second)
    assert not world.agents["p"].withdraw(first)
    world.hub.resume("d")
    wait_for(lambda: world.landed("p") == 1024)
    time.sleep(0.1)
    ended = {c.ticket: (c.outcome, c.reason) for c in world.agents["p"].completions()}
    assert ended == {first: ("error", "withdrawn"), second: ("error", "withdrawn")}
    assert world.landed("p") == 1024


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_killed_side_ends_what_is_posted(world, side: str) -> None:
    world.hub.stop("d")
    ticket = world.write("p")
    time.sleep(0.05)
    world.hub.kill(side)
    completion = world.one("p")
    assert (completion.ticket, completion.outcome) == (ticket, "error")
    assert completion.reason == f"the agent is gone: '{side}'"
    world.hub.resume("d")
    assert world.landed("p") == 0
    world.write("p")
    assert world.one("p").outcome == "error"


def test_removing_a_peer_that_is_only_stopped_leaves_a_late_writer(world) -> None:
    """The reason for quarantine: the ticket has ended, the bytes have not."""
    world.hub.stop("d")
    world.write("p")
    time.sleep(0.05)
    world.agents["p"].remove_peer("d")
    assert world.one("p").reason == "peer removed"
    assert world.landed("p") == 0
    world.hub.resume("d")
    assert world.landed("p") == 2048


def test_posts_fail_as_often_as_told(world) -> None:
    world.hub.fail("p")
    world.write("p")
    completion = world.one("p")
    assert (completion.outcome, completion.reason) == ("error", "a test wants this post to fail")
    world.write("p")
    assert world.one("p").outcome == "done"


def test_delayed_posts_come_late(world) -> None:
    world.hub.delay("p", 0.2)
    began = time.monotonic()
    world.write("p", 1024)
    assert world.one("p").outcome == "done"
    assert time.monotonic() - began >= 0.2


def test_a_new_agent_of_the_same_name_is_another_one(world) -> None:
    world.hub.kill("d")
    again = world.hub.agent("d")
    region = host_region(N, pinned=False)
    again.register(region)
    world.agents["p"].add_peer(again.card())
    world.agents["p"].write("d", [(world.regions["p"].whole, region.whole.remote)])
    assert world.one("p").outcome == "done"
    assert (region.memory == ord("p")).all()
    again.close(1)
