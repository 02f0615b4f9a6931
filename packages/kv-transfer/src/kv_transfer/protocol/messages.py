"""Everything two instances say to each other.

In:  nothing; these are values.
Out: one frozen struct per message, and `Message`, the union of all of them.
Law: torch-free; unknown fields are refused and every text, list and number is bounded, here or by the bounded size of
     a message (docs/wire.md). A value that decodes is in range; whether it fits our cache is for its reader to check.

Two kinds of doors answer: the door of a *rank* (`Transceiver`), and the door of an *instance* (`InstanceDoor`), which
tells where the ranks are and takes back offers. Any change here raises `codec.WIRE_VERSION`.
"""

import enum
from typing import Annotated, Literal

import msgspec

from kv_core.ids import Incarnation, InstanceId, Rank, SessionId, TransferId
from kv_core.spans import Span
from kv_transfer.agent.cards import MAX_NAME_CHARS, AgentCard, DirectCard, RemoteSlice
from kv_transfer.plan.cache_state import MAX_LAYERS, MAX_RANKS, CacheState
from kv_transfer.plan.compatibility import Reason
from kv_transfer.plan.frontier import Ahead
from kv_transfer.plan.plan import MAX_TOKENS, Piece

MAX_DETAIL_CHARS = 2000
MAX_PIECES = 4096
MAX_CHUNKS = 1 << 18
MAX_REASONS = 64
MAX_GAUGES = 512
MAX_GROUPS = 256
MAX_BLOCKS = 1 << 20

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
InstanceName = Annotated[InstanceId, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
IncarnationName = Annotated[Incarnation, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
RankNumber = Annotated[Rank, msgspec.Meta(ge=0, lt=MAX_RANKS)]
Port = Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
SessionName = Annotated[SessionId, msgspec.Meta(pattern="^[0-9a-f]{32}\\Z")]
TransferName = Annotated[TransferId, msgspec.Meta(pattern="^[0-9a-f]{32}\\Z")]
PromptKey = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
ChunkBytes = Annotated[int, msgspec.Meta(ge=64, lt=1 << 40)]
ChunkSeq = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHUNKS)]
NumChunks = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNKS)]
NumTokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
NumComputed = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
NumLayers = Annotated[int, msgspec.Meta(ge=0, le=MAX_LAYERS)]
NumBytes = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=86_400_000)]
Detail = Annotated[str, msgspec.Meta(max_length=MAX_DETAIL_CHARS)]
BlockNumber = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
BlockTable = Annotated[tuple[BlockNumber, ...], msgspec.Meta(max_length=MAX_BLOCKS)]
Checksum = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class RefuseCode(enum.StrEnum):
    """Why a sender ends a session badly."""

    GONE = "gone"
    """Settled, expired, or a session that has ended already."""
    NEVER_CAME = "never_came"
    """No such offer appeared while the ask waited."""
    WRONG_INCARNATION = "wrong_incarnation"
    """The ask is for an earlier or later run of this instance."""
    UNFIT = "unfit"
    """Tokens, pieces or chunk size do not fit the offer or our share of the model."""
    BUSY = "busy"
    """A limit on open sessions or parked asks is reached."""
    DEADLINE = "deadline"
    WRITE_FAILED = "write_failed"
    CLOSING = "closing"
    INTERNAL = "internal"


class RejectCode(enum.StrEnum):
    """Why a message was not taken."""

    STRANGER = "stranger"
    """Whoever says this must be greeted (again) with Hello first."""
    MALFORMED = "malformed"
    UNEXPECTED = "unexpected"
    INTERNAL = "internal"


class Payload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """What all messages share: strict fields, and the message's name as `type`."""


class RankCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one rank listens, what it holds, and the largest chunk that it takes or gives."""

    rank: RankNumber
    host: Name
    port: Port
    state: CacheState
    max_chunk_bytes: ChunkBytes


class SharedBlocks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a sender keeps what was asked for: of each layer group its own blocks from `first` on; -1 is a hole."""

    first: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    by_group: Annotated[tuple[BlockTable, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]


# -- liveness and status, at both doors ------------------------------------------------------------------------------


class Ping(Payload, frozen=True, tag="ping"):
    """Are you there, and who are you?"""


class Pong(Payload, frozen=True, tag="pong"):
    """`rank` is None at the door of an instance."""

    incarnation: IncarnationName
    rank: RankNumber | None


class StatusRequest(Payload, frozen=True, tag="status?"):
    """Answered at any time, to anybody who may connect."""


class StatusReply(Payload, frozen=True, tag="status"):
    """Gauges are back at 0 when nothing is open; counters only grow. Names: docs/wire.md."""

    incarnation: IncarnationName
    rank: RankNumber | None
    gauges: Annotated[dict[Name, int], msgspec.Meta(max_length=MAX_GAUGES)]
    counters: Annotated[dict[Name, int], msgspec.Meta(max_length=MAX_GAUGES)]


class Rejected(Payload, frozen=True, tag="rejected"):
    """The answer to a message that could not be taken; never itself answered."""

    code: RejectCode
    detail: Detail


# -- the door of a rank ----------------------------------------------------------------------------------------------


class Hello(Payload, frozen=True, tag="hello"):
    """Who asks: once per connection and incarnation, repeated until answered."""

    instance: InstanceName
    incarnation: IncarnationName
    card: RankCard
    agent: AgentCard


class HelloReply(Payload, frozen=True, tag="hello!"):
    """Who answers; the asker's agent is known from here on.

    `direct`: how to map our caches; `in_place`: where they lie for the asker's agent. None if that cannot be done.
    """

    instance: InstanceName
    incarnation: IncarnationName
    card: RankCard
    agent: AgentCard
    direct: DirectCard | None
    in_place: DirectCard | None


class HelloRefused(Payload, frozen=True, tag="hello-refused"):
    """These two ranks cannot exchange, for all these reasons."""

    instance: InstanceName
    incarnation: IncarnationName
    reasons: Annotated[tuple[Reason, ...], msgspec.Meta(min_length=1, max_length=MAX_REASONS)]


class Ask(Payload, frozen=True, tag="ask"):
    """Receiver to sender: open a session for these pieces of these tokens. Repeated while unanswered.

    `incarnation` is the addressee's. `num_tokens` is the length of the sequence that context ranks share. Who asks for
    chunks of at most so many layers (0: of all) hears of layers as well. `checksum` asks for one in each Data.
    `direct`: we read the blocks where they lie, and are not sent any.
    """

    session: SessionName
    incarnation: IncarnationName
    transfer_id: TransferName
    prompt_key: PromptKey
    tokens: Span
    num_tokens: NumTokens
    pieces: Annotated[tuple[Piece, ...], msgspec.Meta(min_length=1, max_length=MAX_PIECES)]
    chunk_bytes: ChunkBytes
    layers_per_chunk: NumLayers
    checksum: bool
    direct: bool
    ttl_ms: Milliseconds

    def __post_init__(self) -> None:
        if not self.tokens or self.tokens.start < 0 or self.tokens.stop > self.num_tokens:
            raise ValueError(f"tokens are empty or out of bounds: got={self.tokens}, allowed=[0, {self.num_tokens})")


class Ready(Payload, frozen=True, tag="ready"):
    """Sender to receiver: the offer is here and held for this session; grant memory, or read `blocks`.

    Of its prompt, tokens [0, num_computed) are computed, and those `ahead` in the first layers; said again when there
    is more. Only chunks of what is computed may be granted. `blocks` are told once everything asked for is computed.
    """

    session: SessionName
    num_chunks: NumChunks
    num_bytes: NumBytes
    num_computed: NumComputed
    ahead: Ahead | None
    blocks: SharedBlocks | None


class Refuse(Payload, frozen=True, tag="refuse"):
    """Sender to receiver: this session ends badly. Writes may still be under way until Quiet."""

    session: SessionName
    code: RefuseCode
    detail: Detail


class Grant(Payload, frozen=True, tag="grant"):
    """Receiver to sender: chunk `seq` may be written here, once. Repeated while unanswered."""

    session: SessionName
    seq: ChunkSeq
    slice: RemoteSlice


class Data(Payload, frozen=True, tag="data"):
    """Sender to receiver: chunk `seq` lies in its granted memory, which will not be written again."""

    session: SessionName
    seq: ChunkSeq
    num_bytes: NumBytes
    checksum: Checksum | None


class Close(Payload, frozen=True, tag="close"):
    """Receiver to sender: all arrived. Repeated until Quiet."""

    session: SessionName


class Cancel(Payload, frozen=True, tag="cancel"):
    """Receiver to sender: write no more. Repeated until Quiet."""

    session: SessionName
    reason: Detail


class Quiet(Payload, frozen=True, tag="quiet"):
    """Sender to receiver: no write of this session is under way, and none will ever be.

    `clean`: the offer was held for it until its Close, so that whatever was read is what was offered.
    """

    session: SessionName
    clean: bool


# -- the door of an instance -----------------------------------------------------------------------------------------


class InstanceHello(Payload, frozen=True, tag="instance?"):
    """Where are your ranks? `incarnation`, if known, is the run that the asker was sent to."""

    incarnation: IncarnationName | None


class InstanceCard(Payload, frozen=True, tag="instance"):
    """One run of one instance, and all its ranks."""

    instance: InstanceName
    incarnation: IncarnationName
    ranks: Annotated[tuple[RankCard, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]


class InstanceRefused(Payload, frozen=True, tag="instance-refused"):
    """`not_ready`: ask again; `wrong_incarnation`: whoever sent you meant another run than this one."""

    incarnation: IncarnationName
    code: Literal["not_ready", "wrong_incarnation"]
    detail: Detail


class Renew(Payload, frozen=True, tag="renew"):
    """A consumer still waits for an offer of this pair: hold its lease from now on once more. Never answered.

    Without a prompt key all pairs of the transfer are meant.
    """

    transfer_id: TransferName
    prompt_key: PromptKey | None
    consumer: Name
    incarnation: IncarnationName | None


class Release(Payload, frozen=True, tag="release"):
    """One consumer is done with one offer of this pair. Idempotent per consumer; repeated until answered.

    Without a prompt key (a request whose prompt was never seen) the transfer's only pair is meant.
    """

    transfer_id: TransferName
    prompt_key: PromptKey | None
    consumer: Name
    incarnation: IncarnationName | None


class ReleaseReply(Payload, frozen=True, tag="released"):
    """`known` is false if we never heard of the transfer, or forgot it long ago."""

    transfer_id: TransferName
    prompt_key: PromptKey | None
    consumer: Name
    known: bool


Message = (
    Ping
    | Pong
    | StatusRequest
    | StatusReply
    | Rejected
    | Hello
    | HelloReply
    | HelloRefused
    | Ask
    | Ready
    | Refuse
    | Grant
    | Data
    | Close
    | Cancel
    | Quiet
    | InstanceHello
    | InstanceCard
    | InstanceRefused
    | Renew
    | Release
    | ReleaseReply
)
"""Whatever may travel between two doors."""


def clipped(text: str) -> str:
    """`text` in the length that a detail or reason may have."""
    return text if len(text) <= MAX_DETAIL_CHARS else text[: MAX_DETAIL_CHARS - 3] + "..."
