"""One sample of every message, strategies that draw any, and mutations of their bytes."""

import random
from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from kv_core.ids import Incarnation, InstanceId, Rank, SessionId, TransferId
from kv_core.spans import Span
from kv_testing.layouts import make_state
from kv_transfer.agent.cards import AgentCard, DirectCard, RemoteSlice
from kv_transfer.plan.cache_state import MAX_LAYERS
from kv_transfer.plan.compatibility import Reason
from kv_transfer.plan.frontier import Ahead
from kv_transfer.plan.plan import MAX_TOKENS, Piece
from kv_transfer.protocol import messages as m

HEADER_BYTES: Final = 4
"""Before the body of a packet."""
SESSION = SessionId("0123456789abcdef" * 2)
TRANSFER = TransferId("fedcba9876543210" * 2)
RUN = Incarnation("p-1")
CARD = m.RankCard(rank=Rank(1), host="10.0.0.1", port=7777, state=make_state(), max_chunk_bytes=8 << 20)
AGENT = AgentCard(kind="loopback", name="loopback-1", blob=b"\x00\x01blob")
SLICE = RemoteSlice(address=0x7F00_0000_1000, num_bytes=4096, kind="host", device_id=0)
INTRODUCTION = {"instance": InstanceId("p"), "incarnation": RUN, "card": CARD, "agent": AGENT}

SAMPLES: tuple[m.Message, ...] = (
    m.Ping(),
    m.Pong(incarnation=RUN, rank=Rank(3)),
    m.StatusRequest(),
    m.StatusReply(incarnation=RUN, rank=None, gauges={"offers": 1}, counters={"messages_in": 2}),
    m.Rejected(code=m.RejectCode.STRANGER, detail="say hello first"),
    m.Hello(**INTRODUCTION),  # type: ignore[arg-type]
    m.HelloReply(**INTRODUCTION, direct=DirectCard(kind="cuda-ipc", host="boot", blob=b"handles"), in_place=None),  # type: ignore[arg-type]
    m.HelloRefused(instance=InstanceId("p"), incarnation=RUN, reasons=(Reason("dtype", "float32", "bfloat16"),)),
    m.Ask(
        session=SESSION,
        incarnation=RUN,
        transfer_id=TRANSFER,
        prompt_key=b"\x00" * 32,
        tokens=Span(16, 40),
        num_tokens=41,
        pieces=(Piece(Span(0, 2), Span(1, 3)), Piece(Span(2, 4), Span(0, 4))),
        chunk_bytes=1 << 20,
        layers_per_chunk=8,
        checksum=True,
        direct=False,
        ttl_ms=30_000,
    ),
    m.Ready(
        session=SESSION,
        num_chunks=3,
        num_bytes=12_288,
        num_computed=32,
        ahead=Ahead(3, 40),
        blocks=m.SharedBlocks(first=1, by_group=((3, -1, 7),)),
    ),
    m.Refuse(session=SESSION, code=m.RefuseCode.GONE, detail="expired"),
    m.Grant(session=SESSION, seq=2, slice=SLICE),
    m.Data(session=SESSION, seq=2, num_bytes=4096, checksum=-(1 << 63)),
    m.Close(session=SESSION),
    m.Cancel(session=SESSION, reason="aborted"),
    m.Quiet(session=SESSION, clean=True),
    m.InstanceHello(incarnation=None),
    m.InstanceCard(instance=InstanceId("p"), incarnation=RUN, ranks=(CARD,)),
    m.InstanceRefused(incarnation=RUN, code="not_ready", detail="later"),
    m.Renew(transfer_id=TRANSFER, prompt_key=b"\x01" * 32, consumer="d-1/req", incarnation=RUN),
    m.Release(transfer_id=TRANSFER, prompt_key=b"\x01" * 32, consumer="d-1/req", incarnation=RUN),
    m.ReleaseReply(transfer_id=TRANSFER, prompt_key=b"\x01" * 32, consumer="d-1/req", known=True),
)

_ids = st.text("0123456789abcdef", min_size=32, max_size=32)
_names = st.text(min_size=1, max_size=200)
_details = st.text(max_size=2000)
_keys = st.binary(min_size=1, max_size=64)
_spans = st.tuples(st.integers(0, 4000), st.integers(1, 90)).map(lambda pair: Span(pair[0], pair[0] + pair[1]))
_pieces = st.builds(Piece, _spans, _spans)
_seqs = st.integers(0, m.MAX_CHUNKS - 1)
_bytes = st.integers(1, (1 << 62) - 1)
_slices = st.builds(
    RemoteSlice,
    address=st.integers(0, (1 << 62) - 1),
    num_bytes=_bytes,
    kind=st.sampled_from(["host", "device"]),
    device_id=st.integers(0, 65535),
)
_tables = st.lists(st.lists(st.integers(-1, (1 << 31) - 1), max_size=5).map(tuple), min_size=1, max_size=3).map(tuple)
_counts = st.dictionaries(_names, st.integers(-(1 << 63), (1 << 63) - 1), max_size=8)

ANY_MESSAGE: st.SearchStrategy[m.Message] = st.one_of(
    st.sampled_from(SAMPLES),
    st.builds(m.Pong, incarnation=_names, rank=st.none() | st.integers(0, 4095)),
    st.builds(m.StatusReply, incarnation=_names, rank=st.none(), gauges=_counts, counters=_counts),
    st.builds(m.Rejected, code=st.sampled_from(m.RejectCode), detail=_details),
    st.builds(
        m.Ask,
        session=_ids,
        incarnation=_names,
        transfer_id=_ids,
        prompt_key=_keys,
        tokens=_spans,
        num_tokens=st.integers(4090, MAX_TOKENS),
        pieces=st.lists(_pieces, min_size=1, max_size=8).map(tuple),
        chunk_bytes=st.integers(64, (1 << 40) - 1),
        layers_per_chunk=st.integers(0, MAX_LAYERS),
        checksum=st.booleans(),
        direct=st.booleans(),
        ttl_ms=st.integers(0, 86_400_000),
    ),
    st.builds(
        m.Ready,
        session=_ids,
        num_chunks=st.integers(1, m.MAX_CHUNKS),
        num_bytes=_bytes,
        num_computed=st.integers(0, MAX_TOKENS),
        ahead=st.none() | st.builds(Ahead, st.integers(1, MAX_LAYERS), st.integers(1, MAX_TOKENS)),
        blocks=st.none() | st.builds(m.SharedBlocks, first=st.integers(0, 99), by_group=_tables),
    ),
    st.builds(m.Refuse, session=_ids, code=st.sampled_from(m.RefuseCode), detail=_details),
    st.builds(m.Grant, session=_ids, seq=_seqs, slice=_slices),
    st.builds(
        m.Data,
        session=_ids,
        seq=_seqs,
        num_bytes=_bytes,
        checksum=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    ),
    st.builds(m.Cancel, session=_ids, reason=_details),
    st.builds(m.Quiet, session=_ids, clean=st.booleans()),
    st.builds(m.Renew, transfer_id=_ids, prompt_key=st.none() | _keys, consumer=_names, incarnation=st.none() | _names),
    st.builds(
        m.Release, transfer_id=_ids, prompt_key=st.none() | _keys, consumer=_names, incarnation=st.none() | _names
    ),
)
"""Messages within their bounds; those with big parts only as samples."""


def mutated(packet: bytes, dice: random.Random) -> bytes:
    """One to four random changes."""
    changed = bytearray(packet)
    for _ in range(dice.randint(1, 4)):
        where = dice.randrange(len(changed)) if changed else 0
        match dice.randrange(5):
            case 0:
                changed[where : where + 1] = bytes([dice.randrange(256)])
            case 1:
                del changed[where : where + dice.randint(1, 8)]
            case 2:
                changed[where:where] = dice.randbytes(dice.randint(1, 8))
            case 3:
                changed[where:where] = changed[where : where + dice.randint(1, 16)]
            case 4:
                del changed[where:]
    return bytes(changed)


def altered(packet: bytes, dice: random.Random) -> bytes:
    """A message of the same shape in which one or two values are others, so that most of what comes out is read."""
    body = msgspec.msgpack.decode(packet[HEADER_BYTES:])
    for _ in range(dice.randint(1, 2)):
        body = _altered(body, dice)
    return packet[:HEADER_BYTES] + msgspec.msgpack.encode(body)


def _altered(value: Any, dice: random.Random) -> Any:
    match value:
        case dict():
            name = dice.choice([name for name in value if name != "type"] or [None])
            return value if name is None else value | {name: _altered(value[name], dice)}
        case [*entries] if entries:
            where = dice.randrange(len(entries))
            entry, how = entries[where], dice.random()
            instead = [] if how < 0.05 else [entry, entry] if how < 0.1 else [_altered(entry, dice)]
            return [*entries[:where], *instead, *entries[where + 1 :]]
        case bool():
            return not value
        case int():
            others = (0, 1, max(0, value - 1), value + 1, 2 * value, value ^ (1 << dice.randrange(40)))
            return max(-(1 << 63), min(dice.choice(others), (1 << 64) - 1))
        case str() if value:
            where = dice.randrange(len(value))
            return value[:where] + dice.choice("0123456789abcdef") + value[where + 1 :]
        case bytes() if value:
            where = dice.randrange(len(value))
            return value[:where] + dice.randbytes(1) + value[where + 1 :]
        case _:
            return value
