"""The agent's thread, over a transport that a test controls."""

import threading
import time

import pytest

from kv_core.errors import CallerError
from kv_testing.hangs import Bug, planted
from kv_testing.waiting import wait_for
from kv_transfer.agent.base import AgentClosed, AgentStuck, UnknownPeer
from kv_transfer.agent.blob import pack_blob
from kv_transfer.agent.cards import AgentCard
from kv_transfer.agent.pump import PumpedAgent, PumpLimits
from kv_transfer.agent.transport import TransportError
from kv_transfer.regions import host_region

SOON_S = 20.0


class FakeTransport:
    """Posts are numbers; they move until a test ends them."""

    kind = "fake"

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.posted: list[int] = []
        self.released: list[int] = []
        self.done: set[int] = set()
        self.num_polls = 0
        self.on_post = lambda: None
        self.on_poll = lambda: None
        self.on_close = lambda: None

    def _note(self) -> None:
        self.threads.add(threading.current_thread().name)

    def open(self, name: str) -> None:
        self._note()

    def register(self, region) -> None:
        self._note()

    def deregister(self, region) -> None:
        self._note()

    def blob(self) -> bytes:
        self._note()
        return b"reach me"

    def add_peer(self, name: str, blob: bytes) -> None:
        self._note()

    def remove_peer(self, name: str) -> None:
        self._note()

    def post(self, peer: str, piece) -> int:
        self._note()
        self.on_post()
        self.posted.append(len(self.posted))
        return self.posted[-1]

    def poll(self, post: int) -> bool:
        self._note()
        self.num_polls += 1
        self.on_poll()
        return post in self.done

    def release(self, post: int) -> None:
        self._note()
        self.released.append(post)

    def close(self) -> None:
        self._note()
        self.on_close()


class World:
    """An agent over a FakeTransport, with a region and a peer."""

    def __init__(self, transport: FakeTransport | None = None, **limits: float) -> None:
        self.transport = transport or FakeTransport()
        self.agent = PumpedAgent("us", self.transport, PumpLimits(**limits))
        self.region = host_region(1024, pinned=False)
        self.agent.register(self.region)
        self.learn("them", b"1" * 16)

    def learn(self, name: str, token: bytes) -> None:
        self.agent.add_peer(AgentCard(kind="fake", name=name, blob=pack_blob(token, b"")))

    def write(self, num_bytes: int = 1024):
        part = self.region.slice(0, num_bytes)
        return self.agent.write("them", [(part, part.remote)])


@pytest.fixture
def world():
    made = World(max_post_bytes=256, max_posts_per_peer=2)
    yield made
    made.agent.close(0)


def test_only_the_agents_thread_touches_the_transport(world) -> None:
    ticket = world.write()
    world.transport.done = {0, 1, 2, 3}
    assert [c.ticket for c in wait_for(world.agent.completions)] == [ticket]
    world.agent.card()
    world.agent.remove_peer("them")
    world.agent.deregister(world.region)
    assert world.agent.close(1)
    assert world.transport.threads == {"agent-us"}
    assert world.transport.released == [0, 1, 2, 3]


def test_posts_are_bounded_in_number(world) -> None:
    world.write()
    wait_for(lambda: len(world.transport.posted) == 2)
    time.sleep(0.05)
    assert len(world.transport.posted) == 2
    world.transport.done = {0}
    wait_for(lambda: len(world.transport.posted) == 3)


def test_a_failed_post_drops_what_waits_and_ends_after_what_moves(world) -> None:
    ticket = world.write()
    wait_for(lambda: len(world.transport.posted) == 2)

    def refuse() -> None:
        raise TransportError("the cable is cut")

    world.transport.on_post = refuse
    world.transport.done = {0}
    wait_for(lambda: world.transport.released == [0])
    time.sleep(0.05)
    assert world.agent.completions() == []  # post 1 may still be moving
    world.transport.done = {0, 1}
    (completion,) = wait_for(world.agent.completions)
    assert (completion.ticket, completion.outcome, completion.reason) == (ticket, "error", "the cable is cut")
    assert len(world.transport.posted) == 2


def test_an_idle_agent_sleeps_and_a_waiting_one_polls_gently(world) -> None:
    world.write(256)
    wait_for(lambda: world.transport.posted)
    time.sleep(0.05)
    before, cpu = world.transport.num_polls, time.process_time()
    time.sleep(0.5)
    assert world.transport.num_polls - before <= 600
    assert time.process_time() - cpu < 0.25
    world.transport.done = {0}
    wait_for(world.agent.completions)
    before = world.transport.num_polls
    time.sleep(0.2)
    assert world.transport.num_polls == before


def test_the_waker_is_called_from_the_thread_and_may_fail(world, caplog) -> None:
    woken: list[str] = []

    def waker() -> None:
        woken.append(threading.current_thread().name)
        raise RuntimeError("a waker must not")

    world.agent.on_completion(waker)
    world.transport.done = {0, 1}
    world.write(256)
    wait_for(lambda: "the waker raised" in caplog.text)
    assert woken == ["agent-us"]
    world.write(256)
    wait_for(lambda: len(world.transport.released) == 2)
    assert len(world.agent.completions()) == 2


def test_a_waker_that_comes_late_hears_of_what_waits(world) -> None:
    world.transport.done = {0}
    world.write(256)
    wait_for(lambda: world.transport.released)
    woken = threading.Event()
    world.agent.on_completion(woken.set)
    assert woken.wait(5)


def test_withdrawing_a_part_wakes_the_owner(world) -> None:
    ticket = world.write()
    wait_for(lambda: len(world.transport.posted) == 2)
    assert not world.agent.withdraw(ticket)
    assert world.agent.completions() == []
    world.transport.done = {0, 1}
    (completion,) = wait_for(world.agent.completions)
    assert (completion.outcome, completion.reason) == ("error", "withdrawn")
    assert len(world.transport.posted) == 2


def test_closing_waits_for_what_moves(world) -> None:
    ticket = world.write()
    wait_for(lambda: len(world.transport.posted) == 2)
    threading.Timer(0.2, lambda: world.transport.done.update({0, 1})).start()
    assert world.agent.close(10)
    assert [(c.ticket, c.outcome, c.reason) for c in world.agent.completions()] == [(ticket, "error", "agent closed")]
    assert world.agent.close(10), "closing twice says the same"


def test_closing_gives_up_when_time_is_over(world) -> None:
    world.write()
    wait_for(lambda: len(world.transport.posted) == 2)
    began = time.monotonic()
    assert not world.agent.close(0.2)
    assert time.monotonic() - began < 2
    assert sorted(world.transport.released) == [0, 1]
    assert [c.outcome for c in world.agent.completions()] == ["error"]
    assert not world.agent.close(0.2), "closing twice says the same"


def test_closing_does_not_wait_for_a_stuck_transport(world) -> None:
    unstuck = threading.Event()
    world.transport.on_close = lambda: unstuck.wait(20)
    began = time.monotonic()
    assert not world.agent.close(0.1)
    assert time.monotonic() - began < 5
    unstuck.set()


def test_a_closed_agent_refuses(world) -> None:
    world.agent.close(1)
    for call in (world.write, world.agent.card, lambda: world.agent.deregister(world.region)):
        with pytest.raises(AgentClosed, match="it was closed"):
            call()


def test_a_failed_thread_is_said_and_leaves_nobody_waiting(world, caplog) -> None:
    moving = world.write()
    wait_for(lambda: len(world.transport.posted) == 2)

    def break_down() -> None:
        raise ZeroDivisionError("a bug")

    woken = threading.Event()
    world.agent.on_completion(woken.set)
    waiting = world.agent.write("them", [(world.region.slice(0, 8), world.region.slice(0, 8).remote)])
    world.transport.on_poll = break_down
    assert woken.wait(5)
    # What never moved is over; what may be moving is not, whatever happened to us.
    assert [c.ticket for c in world.agent.completions()] == [waiting]
    with pytest.raises(AgentClosed, match="its thread failed: ZeroDivisionError"):
        world.write()
    with pytest.raises(AgentClosed, match="its thread failed"):
        world.agent.card()
    assert not world.agent.close(1)
    assert [c.ticket for c in world.agent.completions()] == [moving]
    assert "its thread failed" in caplog.text


def test_nobody_waits_long_for_a_thread_that_hangs() -> None:
    world = World(patience_s=0.4)
    ticket = world.write()
    with planted(world.transport, "poll") as plant:
        plant.hang()
        plant.wait_until_met()
        began = time.monotonic()
        with pytest.raises(AgentStuck, match="does not answer: asked=add_peer, it has been in 'poll'"):
            world.learn("late", b"2" * 16)
        assert 0.4 <= time.monotonic() - began < SOON_S
        began = time.monotonic()
        with pytest.raises(AgentStuck, match="hangs: asked=remove_peer"):
            world.agent.remove_peer("them")
        assert time.monotonic() - began < 0.2, "who waited did so for all others"
        assert world.agent.completions() == []
        assert world.agent.withdraw(ticket) is False, "taking back what is not posted needs no thread"
        plant.go_on()
        world.transport.done = {0}
        (completion,) = wait_for(world.agent.completions)
    assert completion.ticket == ticket
    with pytest.raises(UnknownPeer, match="late"):
        world.agent.write("late", [(world.region.slice(0, 8), world.region.slice(0, 8).remote)])
    world.learn("late", b"2" * 16)
    assert world.agent.close(5)


def test_closing_does_not_wait_for_a_thread_that_hangs() -> None:
    world = World()
    world.write()
    with planted(world.transport, "post") as plant:
        plant.hang()
        plant.wait_until_met()
        began = time.monotonic()
        assert not world.agent.close(0.2), "what is posted may be moving"
        assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("name", ["open", "register", "blob", "add_peer", "post", "poll", "release", "close"])
def test_a_thread_that_ends_in_any_call_leaves_nobody_waiting(name) -> None:
    """Bug passes whatever catches Exception."""
    transport = FakeTransport()
    with planted(transport, name) as plant:
        if name == "open":
            plant.kill()
            with pytest.raises(Bug):
                PumpedAgent("us", transport)
            return
        world = World(transport)
        plant.kill()
        world.transport.done = {0}
        ticket = world.write(256)
        if name in ("post", "poll"):
            wait_for(lambda: world.agent.pulse.failure)
        else:
            wait_for(lambda: plant.num_met or world.transport.num_polls)
            calls = {
                "register": lambda: world.agent.register(host_region(64, pinned=False)),
                "blob": world.agent.card,
                "add_peer": lambda: world.learn("other", b"2" * 16),
            }
            if name in calls:
                with pytest.raises((Bug, AgentClosed)):
                    calls[name]()
        began = time.monotonic()
        is_over = world.agent.close(1)
        assert time.monotonic() - began < SOON_S
        assert not is_over, "how far the thread had come is not known"
        assert "Bug('planted')" in world.agent.pulse.failure
        assert [c.ticket for c in world.agent.completions()] == [ticket]
        with pytest.raises(AgentClosed):
            world.write()


def test_a_transport_that_cannot_open_is_said_at_once() -> None:
    class Broken(FakeTransport):
        def open(self, name: str) -> None:
            raise TransportError("no such device")

    with pytest.raises(TransportError, match="no such device"):
        PumpedAgent("us", Broken())
    assert "agent-us" not in {thread.name for thread in threading.enumerate()}


def test_limits_are_positive() -> None:
    with pytest.raises(CallerError, match="max_post_bytes=0"):
        PumpLimits(max_post_bytes=0)
