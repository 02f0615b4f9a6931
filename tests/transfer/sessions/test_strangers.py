"""Whatever arrives at a door: answered or dropped and counted, never a dead thread, never a wrong session."""

import os
import random
import socket
import threading
import time

import msgspec
import pytest
import zmq

from kv_core.ids import Incarnation, InstanceId, Rank, SessionId
from kv_testing.messages import SAMPLES, mutated
from kv_testing.waiting import wait_for
from kv_testing.worlds import SOON_S, fresh_id, pair, state_of
from kv_transfer.protocol import codec
from kv_transfer.protocol import messages as m

NUM_PACKETS = 3000


@pytest.fixture
def caller():
    context = zmq.Context()
    yield Caller(context)
    context.destroy(linger=0)


def _piece(start, stop):
    """Layers and heads of the one rank of such a world, for some tokens."""
    whole = {"start": 0, "stop": 4}
    return {"layers": whole, "heads": whole, "tokens": {"start": start, "stop": stop}}


class Caller:
    """A bare socket that says anything to a door."""

    def __init__(self, context):
        self._context = context
        self._socket = context.socket(zmq.DEALER)

    def call(self, host, port):
        self._socket.connect(f"tcp://{host}:{port}")
        return self

    def say(self, *frames):
        self._socket.send_multipart(list(frames))

    def ask(self, message, timeout_ms=30_000):
        self.say(codec.encode(message))
        return self.hear(timeout_ms)

    def hear(self, timeout_ms=30_000):
        while True:
            assert self._socket.poll(timeout_ms), "no answer"
            message = codec.decode(self._socket.recv())
            if not isinstance(message, m.Ping):
                return message


def _doors(p):
    return {"rank": (p.ranks[0].card.host, p.ranks[0].card.port), "instance": p.door.address}


@pytest.mark.parametrize("door", ["rank", "instance"])
def test_random_and_mutated_messages_at_a_live_door(caller, door):
    dice = random.Random(int(os.environ.get("KVFERRY_FUZZ_SEED", "11")))
    packets = [codec.encode(sample) for sample in SAMPLES]
    with pair() as (p, d, _):
        caller.call(*_doors(p)[door])
        for number in range(NUM_PACKETS):
            match dice.randrange(4):
                case 0:
                    caller.say(dice.randbytes(dice.randrange(200)))
                case 1:
                    caller.say(codec.encode(m.Ping())[:4] + dice.randbytes(dice.randrange(200)))
                case 2:
                    caller.say(dice.choice(packets), b"surplus")
                case 3:
                    caller.say(mutated(dice.choice(packets), dice))
            if number % 100 == 0:
                time.sleep(0.002)
        # Answers to the garbage fill this caller's queue; another one asks.
        status = _fresh(caller).call(*_doors(p)[door]).ask(m.StatusRequest())
        assert status.counters["bad_messages"] > NUM_PACKETS / 4
        assert status.counters.get("internal_errors", 0) == 0
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()


def _fresh(caller):
    return Caller(caller._context)


@pytest.mark.parametrize("door", ["rank", "instance"])
def test_a_foreign_version_is_answered_with_both_versions(caller, door):
    with pair() as (p, _, _hub):
        packet = bytearray(codec.encode(m.Ping()))
        packet[2:4] = (9).to_bytes(2, "little")
        caller.call(*_doors(p)[door]).say(bytes(packet))
        answer = caller.hear()
        assert isinstance(answer, m.Rejected)
        assert answer.detail == f"wire versions differ: ours={codec.WIRE_VERSION}, theirs=9"


def test_a_door_of_a_foreign_version_fails_the_load_with_both_versions(caller, monkeypatch):
    """The prefill engine is newer: its answers cannot be read, and the load says why at once."""
    with pair() as (p, d, _):
        real = codec.encode
        listeners = {p.door._reactor._thread.name}

        def foreign(message, max_bytes=codec.MAX_MESSAGE_BYTES):
            packet = bytearray(real(message, max_bytes))
            if threading.current_thread().name in listeners:
                packet[2:4] = (9).to_bytes(2, "little")
            return bytes(packet)

        monkeypatch.setattr(codec, "encode", foreign)
        d.order(p, p.offer())
        start = time.monotonic()
        assert f"wire versions differ: ours={codec.WIRE_VERSION}, theirs=9" in d.outcome(others=[p]).reason
        assert time.monotonic() - start < SOON_S


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
@pytest.mark.parametrize("door", ["rank", "instance"])
def test_every_message_of_a_stranger_is_survived(caller, door, sample):
    with pair() as (p, _, _hub):
        caller.call(*_doors(p)[door]).say(codec.encode(sample))
        answer = _fresh(caller).call(*_doors(p)[door]).ask(m.StatusRequest())
        assert answer.counters.get("internal_errors", 0) == 0
        assert answer.gauges.get("sessions", 0) == 0


def test_a_stranger_is_told_to_say_hello(caller):
    ask = next(sample for sample in SAMPLES if isinstance(sample, m.Ask))
    with pair() as (p, _, _hub):
        answer = caller.call(*_doors(p)["rank"]).ask(ask)
        assert (type(answer), answer.code) == (m.Rejected, m.RejectCode.STRANGER)


def test_status_tells_what_is_open(caller):
    with pair(state_of(2), state_of(1)) as (p, d, _):
        transfer = p.offer()
        doors = _doors(p)
        caller.call(*doors["rank"])
        at_door = _fresh(caller).call(*doors["instance"])
        wait_for(lambda: caller.ask(m.StatusRequest()).gauges["offers"] == 1, what="the offer at the rank")
        wait_for(lambda: at_door.ask(m.StatusRequest()).gauges["offers"] == 1, what="the offer at the door")
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        d.release(p, transfer)
        p.check_clean()
        status = caller.ask(m.StatusRequest())
        assert not {name: value for name, value in status.gauges.items() if value and name != "peers"}
        assert status.counters["chunks_out"] > 0
        assert (status.incarnation, status.rank) == (p.incarnation, 0)


def test_a_pong_tells_who_is_there(caller):
    with pair() as (p, _, _hub):
        assert caller.call(*_doors(p)["rank"]).ask(m.Ping()) == m.Pong(incarnation=p.incarnation, rank=Rank(0))
        assert _fresh(caller).call(*_doors(p)["instance"]).ask(m.Ping()) == m.Pong(incarnation=p.incarnation, rank=None)


def _hello(incarnation, card, agent):
    return m.Hello(instance=InstanceId("evil"), incarnation=Incarnation(incarnation), card=card, agent=agent)


class TestAnImpostor:
    """A peer that is introduced, and then breaks every rule."""

    @pytest.fixture
    def world(self, caller):
        with pair() as (p, d, hub), socket.create_server(("127.0.0.1", 0)) as listener:
            card = msgspec.structs.replace(d.ranks[0].card, port=listener.getsockname()[1])
            impostor = caller.call(*_doors(p)["rank"])
            agent = hub.agent()
            hello = m.Hello(
                instance=InstanceId("evil"), incarnation=Incarnation("evil-1"), card=card, agent=agent.card()
            )
            assert isinstance(impostor.ask(hello), m.HelloReply)
            yield p, d, impostor
            agent.close(1.0)

    def test_an_agent_speaks_for_one_peer(self, world, caller):
        """Whoever claims the agent of another is refused, and his death would not cut the other off."""
        p, d, _ = world
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        stolen = d.cores[0]._room.identity.agent
        hello = m.Hello(
            instance=InstanceId("evil"), incarnation=Incarnation("evil-2"), card=d.ranks[0].card, agent=stolen
        )
        answer = _fresh(caller).call(*_doors(p)["rank"]).ask(hello)
        assert isinstance(answer, m.HelloRefused)
        assert answer.reasons[0].field == "agent"

    def _ask(self, p, transfer, **changes):
        fields = {
            "session": "e" * 32,
            "incarnation": p.incarnation,
            "transfer_id": transfer,
            "prompt_key": b"k" * 32,
            "tokens": {"start": 0, "stop": 40},
            "num_tokens": 41,
            "pieces": [{"layers": {"start": 0, "stop": 4}, "heads": {"start": 0, "stop": 4}}],
            "chunk_bytes": 1024,
            "layers_per_chunk": 0,
            "checksum": True,
            "direct": False,
            "ttl_ms": 2000,
        }
        return msgspec.convert(fields | changes, m.Ask)

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"tokens": {"start": 0, "stop": 41}}, "tokens are not offered"),
            (
                {"pieces": [{"layers": {"start": 0, "stop": 5}, "heads": {"start": 0, "stop": 4}}]},
                "pieces are not ours",
            ),
            ({"pieces": [{"layers": {"start": 0, "stop": 4}, "heads": {"start": 0, "stop": 4}}] * 2}, "pieces overlap"),
            (
                {"tokens": {"start": 0, "stop": 8}, "pieces": [_piece(4, 12)]},
                "pieces reach beyond the tokens asked for",
            ),
            ({"pieces": [_piece(0, 40), _piece(39, 40)]}, "pieces overlap"),
            ({"chunk_bytes": 4096}, "chunks are too large: ours=1024, theirs=4096"),
            ({"chunk_bytes": 64}, "a chunk cannot hold one unit"),
            ({"incarnation": "p-9"}, "another run of the instance"),
        ],
    )
    def test_asks_that_do_not_fit_are_refused(self, world, changes, why):
        p, _, impostor = world
        answer = impostor.ask(self._ask(p, p.offer(), **changes))
        assert isinstance(answer, m.Refuse)
        assert why in answer.detail
        p.withdraw("p0", "test")
        p.check_clean()

    @pytest.mark.parametrize(("seq", "num_bytes"), [(0, 1), (0, 1 << 40), (9999, 1024)])
    def test_grants_that_do_not_fit_end_the_session(self, world, seq, num_bytes):
        p, _, impostor = world
        transfer = p.offer()
        assert isinstance(impostor.ask(self._ask(p, transfer)), m.Ready)
        slice_ = {"address": 4096, "num_bytes": num_bytes, "kind": "host", "device_id": 0}
        grant = msgspec.convert({"session": "e" * 32, "seq": seq, "slice": slice_}, m.Grant)
        answer = impostor.ask(grant)
        assert (type(answer), answer.code) == (m.Refuse, m.RefuseCode.UNFIT)
        assert isinstance(impostor.hear(), m.Quiet)
        p.withdraw("p0", "test")
        p.check_clean()

    def test_a_grant_into_memory_that_is_not_registered_fails_only_its_session(self, world):
        p, d, impostor = world
        transfer = p.offer()
        assert isinstance(impostor.ask(self._ask(p, transfer)), m.Ready)
        slice_ = {"address": 4096, "num_bytes": 1024, "kind": "host", "device_id": 0}
        answer = impostor.ask(msgspec.convert({"session": "e" * 32, "seq": 0, "slice": slice_}, m.Grant))
        assert (type(answer), answer.code) == (m.Refuse, m.RefuseCode.WRITE_FAILED)
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        d.release(p, transfer)
        p.check_clean()

    def test_sessions_of_others_cannot_be_touched(self, world):
        p, d, impostor = world
        d.order(p, fresh_id())
        wait_for(lambda: p.ranks[0].status().gauges["parked"], what="a parked ask")
        name = next(iter(p.cores[0].sender._sessions))
        answer = impostor.ask(m.Cancel(session=name, reason="mine"))
        assert (type(answer), answer.code) == (m.Rejected, m.RejectCode.UNEXPECTED)
        assert p.ranks[0].status().gauges["parked"] == 1
        d.abort("d0")
        d.check_clean()

    def test_an_ended_session_never_begins_again(self, world):
        p, _, impostor = world
        assert isinstance(impostor.ask(m.Cancel(session=SessionId("e" * 32), reason="early")), m.Quiet)
        answer = impostor.ask(self._ask(p, p.offer()))
        assert (type(answer), answer.code) == (m.Refuse, m.RefuseCode.GONE)
        assert isinstance(impostor.hear(), m.Quiet)
        p.withdraw("p0", "test")
        p.check_clean()
