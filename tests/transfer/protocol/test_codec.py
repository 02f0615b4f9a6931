"""Messages as bytes: golden, there and back, and whatever else may arrive."""

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import CallerError, CapacityError
from kv_testing.messages import ANY_MESSAGE, SAMPLES, SESSION, mutated
from kv_transfer.protocol import codec
from kv_transfer.protocol import messages as m
from kv_transfer.protocol.errors import ForeignVersion, MalformedMessage, ProtocolError

GOLDEN = Path(__file__).parent / "golden.json"
NUM_MUTATIONS = 100_000
HEADER = b"kf" + codec.WIRE_VERSION.to_bytes(2, "little")


@given(ANY_MESSAGE)
def test_a_message_survives_the_wire(message):
    assert codec.decode(codec.encode(message)) == message


def test_every_message_has_a_sample():
    assert {type(sample) for sample in SAMPLES} == set(m.Message.__args__)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_golden_bytes(sample):
    """A difference here is a new wire version: raise it, add a line to docs/wire.md, write new golden bytes."""
    golden = json.loads(GOLDEN.read_text())
    assert golden["version"] == codec.WIRE_VERSION
    assert codec.encode(sample).hex() == golden["messages"][type(sample).__name__]
    assert codec.decode(bytes.fromhex(golden["messages"][type(sample).__name__])) == sample


def test_a_foreign_version_names_both():
    packet = bytearray(codec.encode(m.Ping()))
    packet[2:4] = (codec.WIRE_VERSION + 1).to_bytes(2, "little")
    with pytest.raises(ForeignVersion, match=f"ours={codec.WIRE_VERSION}, theirs={codec.WIRE_VERSION + 1}"):
        codec.decode(bytes(packet))


@pytest.mark.parametrize(
    "packet", [b"", b"k", HEADER[:3], b"HTTP/1.1 200 OK", HEADER, HEADER + b"\xc1", b"xx" + HEADER[2:] + b"\x80"]
)
def test_garbage_is_malformed(packet):
    with pytest.raises(MalformedMessage):
        codec.decode(packet)


def test_a_pickle_is_malformed():
    import pickle

    with pytest.raises(MalformedMessage):
        codec.decode(HEADER + pickle.dumps(print))


def test_a_long_packet_is_not_looked_at():
    with pytest.raises(MalformedMessage, match="length out of bounds"):
        codec.decode(codec.encode(SAMPLES[5]), max_bytes=100)


def test_our_own_long_message_is_not_sent():
    with pytest.raises(CapacityError, match="most=100"):
        codec.encode(SAMPLES[5], max_bytes=100)


UNSPEAKABLE = [
    m.Release(transfer_id=SAMPLES[-1].transfer_id, prompt_key=None, consumer="d/" + "r" * 199, incarnation=None),
    m.InstanceHello(incarnation="r" * 201),
    m.InstanceHello(incarnation="\ud800"),
    m.Pong(incarnation="", rank=None),
    m.Ready(session="not hex", num_chunks=1, num_bytes=1, num_computed=1, ahead=None, blocks=None),
    m.Data(session=SESSION, seq=-1, num_bytes=1 << 62, checksum=None),
]


@pytest.mark.parametrize("message", UNSPEAKABLE, ids=lambda message: type(message).__name__)
def test_what_no_peer_would_take_is_not_sent(message):
    with pytest.raises(CallerError, match=f"{type(message).__name__} would be refused by every peer"):
        codec.encode(message)


BAD_FIELDS = [
    ("Quiet", "session", "A" * 32),
    ("Quiet", "session", "0" * 31),
    ("Quiet", "session", "0" * 32 + "\n"),
    ("Data", "seq", -1),
    ("Data", "seq", m.MAX_CHUNKS),
    ("Data", "num_bytes", 0),
    ("Data", "num_bytes", 1 << 63),
    ("Data", "checksum", "1"),
    ("Grant", "slice", {"address": -1, "num_bytes": 1, "kind": "host", "device_id": 0}),
    ("Grant", "slice", {"address": 1, "num_bytes": 1, "kind": "disk", "device_id": 0}),
    ("Ask", "tokens", {"start": 5, "stop": 5}),
    ("Ask", "tokens", {"start": 7, "stop": 5}),
    ("Ask", "tokens", {"start": 0, "stop": 1 << 40}),
    ("Ask", "tokens", {"start": -1, "stop": 5}),
    ("Ask", "pieces", []),
    ("Ask", "pieces", [{"layers": {"start": 0, "stop": 1 << 50}, "heads": {"start": 0, "stop": 1}}]),
    ("Ask", "chunk_bytes", 63),
    ("Ask", "layers_per_chunk", -1),
    ("Ask", "layers_per_chunk", 4097),
    ("Ask", "ttl_ms", -1),
    ("Ready", "ahead", {"layer_stop": 0, "token_stop": 1}),
    ("Ready", "ahead", {"layer_stop": 4097, "token_stop": 1}),
    ("Ready", "ahead", {"layer_stop": 1, "token_stop": 0}),
    ("Ready", "ahead", {"layer_stop": 1, "token_stop": 1 << 32}),
    ("Ready", "ahead", {"layer_stop": 1}),
    ("Ready", "ahead", {"layer_stop": 1, "token_stop": 1, "surplus": 1}),
    ("Ready", "ahead", 7),
    ("Ask", "prompt_key", b""),
    ("Refuse", "code", "because"),
    ("Cancel", "reason", "x" * (m.MAX_DETAIL_CHARS + 1)),
    ("Pong", "rank", -1),
    ("InstanceCard", "ranks", []),
    ("Release", "consumer", ""),
    ("Quiet", "surplus", 1),
    ("Quiet", "type", "quiett"),
]


@pytest.mark.parametrize(("name", "field", "bad"), BAD_FIELDS)
def test_out_of_range_is_malformed(name, field, bad):
    sample = next(sample for sample in SAMPLES if type(sample).__name__ == name)
    fields = msgspec.msgpack.decode(codec.encode(sample)[4:]) | {field: bad}
    with pytest.raises(MalformedMessage):
        codec.decode(HEADER + msgspec.msgpack.encode(fields))


def test_deep_nesting_is_malformed():
    with pytest.raises(MalformedMessage):
        codec.decode(HEADER + b"\x91" * 1_000_000)


def test_a_huge_announced_length_costs_nothing():
    for header in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        body = b"\x82\xa4type\xa3ask\xa6pieces" + header
        with pytest.raises(MalformedMessage):
            codec.decode(HEADER + body)


@given(st.binary(max_size=300))
def test_random_bytes_are_documented_errors(packet):
    for prefix in (b"", HEADER):
        with contextlib.suppress(ProtocolError):
            codec.decode(prefix + packet)


def test_mutated_messages_are_documented_errors():
    """Bytes flipped, cut, doubled: a message or a ProtocolError, nothing else."""
    dice = random.Random(int(os.environ.get("KVFERRY_FUZZ_SEED", "7")))
    packets = [codec.encode(sample) for sample in SAMPLES]
    num_decoded = 0
    for _ in range(int(os.environ.get("KVFERRY_FUZZ_COUNT", NUM_MUTATIONS))):
        try:
            codec.decode(mutated(dice.choice(packets), dice))
            num_decoded += 1
        except ProtocolError:
            pass
    assert num_decoded > 0, "some mutations must leave a valid message, or nothing was tested"


def test_the_protocol_loads_no_torch():
    code = (
        "import sys, kv_transfer.protocol.codec, kv_transfer.protocol.session, kv_transfer.instance\n"
        "print([name for name in ('torch', 'numpy', 'triton', 'nixl') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
