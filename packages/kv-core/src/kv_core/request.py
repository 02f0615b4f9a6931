"""What an engine says of a request, and what the manager answers, as values.

In:  -
Out: `Request`, `Admission`, `Lookup`, `MissingPrefix`, `BlockView`, and the `Protocol` of an external cache.
Law: values only. "Not enough blocks now" is None where an Admission is returned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from msgspec import Struct

from kv_core.errors import CallerError
from kv_core.ids import BlockId, BlockOrdinal, RequestId
from kv_core.keys import Scope
from kv_core.retention import RetentionConfig

NO_SCOPE: Final = Scope()


class Request(Struct, frozen=True):
    """One request: its prompt and who may share its cache.

    `tokens` are those that the cache is made of: the prompt, or the encoder's tokens in a cross cache. A token is 32
    bits; -1 and 0xFFFFFFFF are one token. Without tokens, `num_tokens` says how many there are, and nothing is shared.
    `extra_ids` qualify the tokens one by one. With `max_new_tokens` a request is refused at once that could never end,
    for want of blocks or of length. A dummy is neither matched with an external cache nor published.
    """

    request_id: RequestId
    tokens: Sequence[int] | None
    scope: Scope = NO_SCOPE
    num_tokens: int = 0
    extra_ids: Sequence[int] | None = None
    retention: RetentionConfig | None = None
    is_dummy: bool = False
    max_new_tokens: int = 0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise CallerError(f"a request has at least one token: {self.request_id!r}")  # core spec D24
        if self.tokens is None and self.extra_ids is not None:
            raise CallerError(f"extra ids qualify tokens, and there are none: {self.request_id!r}")
        if self.extra_ids is not None and self.tokens is not None and len(self.extra_ids) != len(self.tokens):
            raise CallerError(f"one extra id a token: tokens={len(self.tokens)}, extra_ids={len(self.extra_ids)}")

    @property
    def length(self) -> int:
        """Prompt tokens."""
        return self.num_tokens if self.tokens is None else len(self.tokens)


class RequestStats(NamedTuple):
    """Blocks that admitting one request took, in all windows together (core spec 14).

    `allocated` counts blocks taken, `fresh` those of them that gave up no cached content; a position is `reused` if
    at least one of its tokens was found, otherwise `missed`.
    """

    allocated: int
    fresh: int
    reused: int
    missed: int

    @property
    def hit_rate(self) -> float:
        """Reused positions over all; 0 if there are none."""
        return self.reused / (self.reused + self.missed) if self.reused else 0.0


class Probe(NamedTuple):
    """What admitting a request would find and cost now; volatile.

    By window: `num_needed` blocks would be taken, `num_available` are free and not part of the match, and the number of
    free blocks would fall by `num_used`, claimed ones included.
    """

    num_cached: int
    num_needed: dict[int, int]
    num_available: dict[int, int]
    num_used: dict[int, int]

    @property
    def fits(self) -> bool:
        """Whether the request would be admitted."""
        return all(self.num_needed[window] <= free for window, free in self.num_available.items())


class Admission(NamedTuple):
    """A request got its blocks. `num_cached` prompt tokens are present in *every* window, `num_external` more come
    from elsewhere; at least one token is left to compute.
    """

    num_cached: int
    num_external: int
    stats: RequestStats

    @property
    def num_prepopulated(self) -> int:
        """Prompt tokens that the engine need not compute (core spec 1.7)."""
        return self.num_cached + self.num_external


class ExternalCache(Protocol):
    """Another place that may supply cache: a peer, a store (core spec 8.3)."""

    def num_matched_tokens(self, request: Request, num_cached: int) -> int:
        """How many prompt tokens behind the first `num_cached` it can supply."""
        ...


class Lookup(NamedTuple):
    """Cached blocks of a token path in one window, first block first; volatile. Holes of a sliding window are None."""

    num_tokens: int
    block_ids: tuple[BlockId | None, ...]


@dataclass(frozen=True, slots=True)
class MissingPrefix:
    """The prompt up to and including its first full block that is not cached (core spec 4.6, D43).

    Equal values name equal content, so an engine can hold back a request whose missing prefix another one computes.
    """

    scope: Scope
    num_tokens: int
    content: bytes


class ContextChunk(NamedTuple):
    """The next tokens of a prompt to compute."""

    position: int
    size: int


class BlockView(NamedTuple):
    """One block as it is now. `parent` is the block before it in the reuse tree; None at a root or outside."""

    tier: int
    slot: int
    priority: int
    held: bool
    published: bool
    ordinal: BlockOrdinal | None
    parent: BlockId | None


def context_chunk(num_prepopulated: int, chunk_size: int, prompt_length: int, tokens_per_block: int) -> ContextChunk:
    """The first chunk of a prompt of which `num_prepopulated` tokens are present (core spec 1.7).

    Unless it ends the prompt it ends on a block. Raises CallerError if nothing is left to compute.
    """
    if not 0 <= num_prepopulated < prompt_length:
        raise CallerError(f"a token is left to compute: prepopulated={num_prepopulated}, prompt={prompt_length}")
    stop = num_prepopulated + chunk_size
    if stop >= prompt_length:
        return ContextChunk(num_prepopulated, prompt_length - num_prepopulated)
    if num_prepopulated:
        stop -= stop % tokens_per_block
    if stop <= num_prepopulated:
        raise CallerError(
            f"a chunk reaches the end of a block: chunk={chunk_size}, tokens_per_block={tokens_per_block}"
        )
    return ContextChunk(num_prepopulated, stop - num_prepopulated)
