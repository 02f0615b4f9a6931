"""What NIXL does when the other process is killed or stopped, over shared memory and TCP.

These tests are the evidence for the law of docs/decisions/0001: only DONE, ERR or a peer's death end a write, and even
a dead writer's bytes may still be on the way.
"""

import time
from collections.abc import Iterator

import pytest
import torch

from kv_testing.nixl_peer import NixlPeer, ucx_tls
from kv_testing.waiting import wait_for
from kv_transfer.agent.base import LATE_BYTES_GRACE_S, Agent, Completion, Ticket
from kv_transfer.agent.nixl import NixlConfig, nixl_agent
from kv_transfer.agent.pump import PumpLimits
from kv_transfer.regions import Region, host_region

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(240)]

MIB = 1 << 20
SIZE = 32 * MIB
SMALL_POSTS = PumpLimits(max_post_bytes=MIB)
TINY_POSTS = PumpLimits(max_post_bytes=16 << 10, max_posts_per_peer=1)
DEADLINE_S = 1.0
"""How long a test waits before it says "late"."""
PATIENCE_S = 60.0
"""How soon tickets to a dead peer must end, and bytes that can move must have moved; seen: within 0.1 s and 5 s."""


@pytest.fixture(params=[None, "tcp"], ids=["shm", "tcp"])
def tls(request) -> str | None:
    return request.param


class Us:
    """Our agent, in the test's process, with one region."""

    def __init__(self, tls: str | None) -> None:
        with ucx_tls(tls):
            self.agent: Agent = nixl_agent(NixlConfig(limits=SMALL_POSTS))
        self.region: Region = host_region(SIZE)
        self.agent.register(self.region)
        self.completions: dict[Ticket, Completion] = {}

    def write(self, peer: NixlPeer, num_bytes: int = SIZE) -> Ticket:
        return self.agent.write(peer.name, [(self.region.slice(0, num_bytes), peer.slice(0, num_bytes))])

    def greet(self, peer: NixlPeer) -> None:
        """Opens the connection with a first write of one byte, of value 0."""
        self.region.memory.zero_()
        self.agent.add_peer(peer.card)
        self.wait(self.write(peer, 1))

    def ended(self) -> dict[Ticket, Completion]:
        self.completions |= {completion.ticket: completion for completion in self.agent.completions()}
        return self.completions

    def wait(self, *tickets: Ticket, timeout_s: float = PATIENCE_S) -> list[Completion]:
        wait_for(lambda: set(tickets) <= set(self.ended()), timeout_s, "the end of every ticket")
        return [self.completions[ticket] for ticket in tickets]


@pytest.fixture
def us(tls) -> Iterator[Us]:
    made = Us(tls)
    yield made
    assert made.agent.close(5)


def num_landed(memory: torch.Tensor, value: int) -> int:
    return int((memory == value).sum())


def test_a_killed_peer_ends_every_ticket_and_a_restarted_one_works(us, tls) -> None:
    with NixlPeer(tls, SIZE, name="decode-0") as first, NixlPeer(tls, SIZE, name="decode-0") as second:
        us.greet(first)
        us.region.memory.fill_(1)
        tickets = [us.write(first) for _ in range(30)]
        wait_for(first.region.memory[:MIB].any, what="the first bytes")
        first.kill()
        died = time.monotonic()
        completions = us.wait(*tickets)
        assert time.monotonic() - died < PATIENCE_S
        assert completions[-1].outcome == "error"
        assert "DISCONNECT" in completions[-1].reason
        # A write to the dead ends too.
        assert us.wait(us.write(first))[0].outcome == "error"
        # Same role, same name, new process.
        us.agent.add_peer(second.card)
        assert us.wait(us.write(second))[0].outcome == "done"
        assert num_landed(second.region.memory, 1) == SIZE


def test_removing_a_dead_peer_ends_its_tickets(us, tls) -> None:
    with NixlPeer(tls, SIZE) as dead, NixlPeer(tls, SIZE) as other:
        us.greet(dead)
        tickets = [us.write(dead) for _ in range(20)]
        dead.kill()
        us.agent.remove_peer(dead.name)
        assert set(tickets) <= set(us.ended())
        us.greet(other)
        us.region.memory.fill_(1)
        assert us.wait(us.write(other))[0].outcome == "done"
        assert num_landed(other.region.memory, 1) == SIZE


def test_a_write_to_a_stopped_peer_is_done_only_when_its_bytes_are_there(us, tls) -> None:
    """TCP: the write lands after any deadline. Shared memory: done while the peer is stopped, and the bytes are there,
    where the kernel lets us copy into another process; elsewhere as over TCP."""
    with NixlPeer(tls, SIZE) as peer:
        us.greet(peer)
        us.region.memory.fill_(1)
        peer.stop()
        ticket = us.write(peer)
        time.sleep(DEADLINE_S)
        if tls == "tcp":
            assert ticket not in us.ended()
            assert num_landed(peer.region.memory, 1) == 0
        if ticket in us.ended():
            assert num_landed(peer.region.memory, 1) == SIZE
        peer.resume()
        assert us.wait(ticket)[0].outcome == "done"
        assert num_landed(peer.region.memory, 1) == SIZE


def test_first_contact_with_a_stopped_peer_waits_for_it(us, tls) -> None:
    """Before the two ever spoke nothing is done over either transport until the peer goes on."""
    with NixlPeer(tls, SIZE) as peer:
        us.agent.add_peer(peer.card)
        us.region.memory.fill_(1)
        peer.stop()
        ticket = us.write(peer)
        time.sleep(DEADLINE_S)
        assert ticket not in us.ended()
        peer.resume()
        assert us.wait(ticket)[0].outcome == "done"
        assert num_landed(peer.region.memory, 1) == SIZE


def test_a_peer_killed_while_it_is_stopped_ends_its_tickets(us, tls) -> None:
    with NixlPeer(tls, SIZE) as peer:
        us.agent.add_peer(peer.card)
        peer.stop()
        tickets = [us.write(peer) for _ in range(3)]
        time.sleep(0.2)
        peer.kill()
        assert [completion.outcome for completion in us.wait(*tickets)] == ["error"] * 3


def test_removing_a_peer_that_is_only_stopped_does_not_stop_the_bytes() -> None:
    """Negative control for the law: over TCP the handle is released and the peer removed, the ticket has "ended", and
    its bytes land when the peer goes on. Hence silence is not death, and such memory stays in quarantine."""
    us = Us("tcp")
    with NixlPeer("tcp", SIZE) as peer:
        us.greet(peer)
        us.region.memory.fill_(1)
        peer.stop()
        ticket = us.write(peer)
        time.sleep(0.2)
        us.agent.remove_peer(peer.name)
        (completion,) = us.wait(ticket)
        assert (completion.outcome, completion.reason) == ("error", "peer removed")
        assert us.agent.close(5)
        assert num_landed(peer.region.memory, 1) == 0
        peer.resume()
        wait_for(lambda: num_landed(peer.region.memory, 1) > 0, what="late bytes")


def test_a_stopped_writer_goes_on_after_the_deadline(us, tls) -> None:
    """The receiver's side of the same: memory freed at a deadline would be overwritten by the writer, resumed."""
    with NixlPeer(tls, SIZE, limits=TINY_POSTS) as writer:
        writer.region.memory.fill_(1)
        writer.ask("add_peer", us.agent.card())
        ticket = writer.ask("write", us.agent.name, us.region.whole.remote)
        wait_for(us.region.memory[:4096].any, timeout_s=PATIENCE_S, what="the first bytes")
        writer.stop()
        time.sleep(DEADLINE_S)
        at_deadline = num_landed(us.region.memory, 1)
        assert at_deadline < SIZE
        time.sleep(0.2)
        assert num_landed(us.region.memory, 1) == at_deadline
        writer.resume()
        (completion,) = wait_for(lambda: writer.ask("completions"), PATIENCE_S)
        assert (completion.ticket, completion.outcome) == (ticket, "done")
        assert num_landed(us.region.memory, 1) == SIZE


def test_bytes_of_a_dead_writer_land_within_the_grace() -> None:
    """Over TCP they wait in the sockets of a receiver that was stopped, and land when it goes on."""
    with NixlPeer("tcp", SIZE) as receiver, NixlPeer("tcp", SIZE) as writer:
        writer.ask("add_peer", receiver.card)
        writer.ask("write", receiver.name, receiver.slice(0, 1))
        wait_for(lambda: writer.ask("completions"))
        writer.region.memory.fill_(1)
        receiver.stop()
        writer.ask("write", receiver.name, receiver.slice(0, SIZE))
        time.sleep(0.2)
        writer.kill()
        assert num_landed(receiver.region.memory, 1) == 0
        receiver.resume()
        wait_for(lambda: num_landed(receiver.region.memory, 1) > 0, what="bytes of the dead")
        time.sleep(LATE_BYTES_GRACE_S)
        after_grace = num_landed(receiver.region.memory, 1)
        assert after_grace < SIZE
        time.sleep(LATE_BYTES_GRACE_S)
        assert num_landed(receiver.region.memory, 1) == after_grace


def test_a_connection_that_both_ends_survive_is_never_closed(us, tls) -> None:
    """Why our agent is told to forget the dead only: see `Peers._part_from`. Whoever stays known costs nothing."""
    with NixlPeer(tls, SIZE) as peer:
        num_handles = []
        for removes in (False, False, True, True, True):
            us.greet(peer)
            peer.ask("add_peer", us.agent.card())
            num_handles.append(peer.held.num_handles)
            if removes:
                us.agent.remove_peer(peer.name)
                peer.ask("remove_peer", us.agent.name)
        assert num_handles[0] == num_handles[1] == num_handles[2] < num_handles[3] < num_handles[4]


def test_an_idle_agent_leaves_the_processor_alone(us) -> None:
    time.sleep(0.1)
    began = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - began < 0.3
