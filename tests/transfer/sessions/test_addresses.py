"""What is called, and what is remembered of it: addresses only, and never more than is needed."""

import errno
import socket
from dataclasses import replace

import pytest
import zmq

from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, PROMPT, fresh_id, make_side, sides, state_of
from kv_transfer import directory
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.config import ConfigError, TransferConfig
from kv_transfer.orders import Errand
from kv_transfer.reactor import Reactor
from kv_transfer.wire import UnusableAddress


@pytest.fixture
def wire():
    reactor = Reactor("addresses", FAST)
    yield reactor.wire
    reactor.discard()


@pytest.mark.parametrize("host", ["slow.example", "prefill-0", "127.1", "no such host", "*", ""])
def test_names_are_refused_and_never_looked_up(wire, monkeypatch, host):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **named: pytest.fail("a name is looked up"))
    with pytest.raises(UnusableAddress, match="numeric address") as caught:
        wire.call(host, 7777)
    assert f"host={host!r}" in str(caught.value)
    assert wire.num_links == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_addresses_are_called(wire, host):
    link = wire.call(host, 7777)
    assert wire.num_links == 1
    wire.hang_up(link)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_ports_out_of_range_are_refused(wire, port):
    with pytest.raises(UnusableAddress, match=f"port={port}"):
        wire.call("127.0.0.1", port)


def test_no_socket_left_is_an_unusable_address(wire, monkeypatch):
    def exhausted(kind):
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(wire, "_socket", exhausted)
    with pytest.raises(UnusableAddress, match="Too many open files"):
        wire.call("127.0.0.1", 7777)


def test_an_own_address_that_peers_could_not_call_is_refused():
    with pytest.raises(ConfigError, match=r"numeric addresses only: got='prefill-0'; set advertised_host"):
        TransferConfig(bind_host="prefill-0")
    with pytest.raises(ConfigError, match="advertised_host"):
        TransferConfig(advertised_host="prefill-0.example")
    assert TransferConfig(bind_host="prefill-0", advertised_host="10.0.0.1").call_host == "10.0.0.1"


def test_a_door_is_forgotten_with_its_last_release():
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        sides(make_side(LoopbackHub(), "d", state_of(), replace(FAST, release_deadline_s=0.5))) as (d,),
    ):
        for _ in range(3):
            d.door.release(Errand("127.0.0.1", mute.getsockname()[1], fresh_id(), PROMPT, "d/0"))
        wait_for(lambda: d.door.status().counters.get("releases_given_up") == 3, what="the releases' end")
        wait_for(lambda: not d.door._reactor.wire.num_links, what="hanging up")
        assert not d.door._porter.releaser._doors


def test_the_cards_used_last_are_remembered(monkeypatch):
    monkeypatch.setattr(directory, "MAX_CARDS", 2)
    hub = LoopbackHub()
    with sides(*(make_side(hub, name, state_of()) for name in ("d", "p1", "p2", "p3"))) as (d, *senders):
        p1, p2, p3 = senders
        for number, p in enumerate((p1, p2, p1, p3)):
            transfer = p.offer(f"p{number}")
            d.order(p, transfer, f"d{number}")
            assert d.outcome(f"d{number}", others=[p]).ok
        assert list(d.cores[0].loads.directory._cards) == [p1.door.address, p3.door.address]
