"""Control messages that are dropped, doubled or late: every load ends, most of them well."""

import random
import time

import pytest

from kv_testing.waiting import wait_for
from kv_testing.worlds import Switches, pair, state_of
from kv_transfer.protocol import codec

TO_SENDER = ["Hello", "Ask", "Grant", "Close", "InstanceHello"]
TO_RECEIVER = ["HelloReply", "Ready", "Data", "Quiet"]


@pytest.mark.parametrize("name", TO_SENDER + TO_RECEIVER)
def test_a_message_that_is_lost_for_a_while_is_said_again(name):
    p_faults, d_faults = Switches(), Switches()
    faults = d_faults if name in TO_SENDER else p_faults
    faults.dropped = {name}
    with pair(state_of(1), state_of(1), prefill_faults=p_faults, decode_faults=d_faults) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        wait_for(lambda: faults.num_said[name] >= 2, what=f"{name}, said again")
        faults.dropped = set()
        received = d.outcome(others=[p])
        assert received.ok, received.reason
        assert d.misplaced() == 0
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()


@pytest.mark.parametrize("name", TO_SENDER + TO_RECEIVER)
def test_a_message_that_arrives_hurt_is_said_again(name, monkeypatch):
    """The other side rejects it as malformed, which is no answer."""
    encode, num_said = codec.encode, 0

    def hurt(message, *args):
        nonlocal num_said
        packet = encode(message, *args)
        if type(message).__name__ != name:
            return packet
        num_said += 1
        return packet[:-1] if num_said == 1 else packet

    monkeypatch.setattr(codec, "encode", hurt)
    with pair(state_of(1), state_of(1)) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        received = d.outcome(others=[p])
        assert received.ok, received.reason
        wait_for(lambda: num_said >= 2, what=f"{name}, said again")
        assert d.misplaced() == 0
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()


def test_every_message_twice_changes_nothing():
    p_faults, d_faults = Switches(doubled=True), Switches(doubled=True)
    with pair(state_of(2), state_of(2), prefill_faults=p_faults, decode_faults=d_faults) as (p, d, _):
        for number in range(4):
            transfer = p.offer(f"p{number}")
            d.order(p, transfer, f"d{number}")
            received = d.outcome(f"d{number}", others=[p])
            assert received.ok, received.reason
            d.release(p, transfer, f"d{number}")
        assert d.misplaced() == 0
        d.check_clean()
        p.check_clean()
        assert p.count("chunks_out") == d.count("chunks_in"), "a chunk was written twice"


@pytest.mark.parametrize("seed", range(4))
def test_late_and_reordered_messages(seed):
    """Each message and its double leave after a random pause, so they overtake each other."""
    dice = random.Random(seed)
    p_faults = Switches(doubled=True, delay_s=lambda: dice.random() * 0.05)
    d_faults = Switches(doubled=True, delay_s=lambda: dice.random() * 0.05)
    with pair(state_of(2), state_of(1), prefill_faults=p_faults, decode_faults=d_faults) as (p, d, _):
        transfers = [p.offer(f"p{number}") for number in range(3)]
        for number, transfer in enumerate(transfers):
            d.order(p, transfer, f"d{number}")
        for number, transfer in enumerate(transfers):
            received = d.outcome(f"d{number}", others=[p])
            assert received.ok, received.reason
            d.release(p, transfer, f"d{number}")
        assert d.misplaced() == 0
        d.check_clean()
        p.check_clean()


def test_a_wire_that_loses_a_third_of_everything():
    dice = random.Random(3)
    p_faults, d_faults = Lossy(dice), Lossy(dice)
    with pair(state_of(2), state_of(1), prefill_faults=p_faults, decode_faults=d_faults) as (p, d, _):
        for number in range(2):
            transfer = p.offer(f"p{number}")
            d.order(p, transfer, f"d{number}")
            received = d.outcome(f"d{number}", others=[p])
            assert received.ok or "deadline" in received.reason, received.reason
            d.release(p, transfer, f"d{number}")
        p_faults.share = d_faults.share = 0.0
        d.check_clean(20)
        p.check_clean(20)


class Lossy(Switches):
    """Loses a share of all messages."""

    def __init__(self, dice):
        super().__init__()
        self.dice = dice
        self.share = 1 / 3

    def outgoing(self, message):
        return () if self.dice.random() < self.share else super().outgoing(message)


class TenSecondsLate(Switches):
    """The first message of each kind leaves ten seconds late; what is said again does not."""

    def outgoing(self, message):
        super().outgoing(message)
        return (10.0,) if self.num_said[type(message).__name__] == 1 else (0.0,)


@pytest.mark.patient
def test_ten_seconds_late_is_too_late_to_matter():
    """Each step is said again long before; what comes at last belongs to sessions that are over."""
    p_faults, d_faults = TenSecondsLate(), TenSecondsLate()
    with pair(state_of(1), state_of(1), prefill_faults=p_faults, decode_faults=d_faults) as (p, d, _):
        start = time.monotonic()
        for name in ("first", "second"):
            transfer = p.offer(f"p-{name}")
            d.order(p, transfer, f"d-{name}")
            received = d.outcome(f"d-{name}", others=[p])
            assert received.ok, received.reason
            d.release(p, transfer, f"d-{name}")
            if name == "first":
                assert time.monotonic() - start < 9, "nobody has waited for what is late"
                assert {"Ask", "Grant", "Close"} <= set(d_faults.num_said)
                assert {"Ready", "Data"} <= set(p_faults.num_said)
                time.sleep(11 - (time.monotonic() - start))
        assert d.misplaced() == 0
        d.check_clean()
        p.check_clean()
