"""What decides the content of one block, spelled out: tokens, adapter, salt and multimodal items.

In:  the tokens of a request and what qualifies them.
Out: `BlockContent` values, and the functions that cut a request into them (core spec 1.3 to 1.5).
Law: two blocks may share cache only if their contents are equal in every field; an absent adapter or salt differs from
     0. What is inconsistent is refused, never ignored (core spec D13).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, TypeVar

from kv_core.errors import CallerError
from kv_core.spans import Span

Token = TypeVar("Token")

DIGEST_WORDS: Final = 8
_WORD_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class ItemPart:
    """The part of a multimodal item that lies in a block: whose it is and where in the item the block starts."""

    digest: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class BlockContent:
    """Everything that decides a block's keys and values, apart from what precedes it.

    `extra_ids` qualify the tokens one by one; None says that the request has none, which differs from all zeros.
    """

    tokens: tuple[int, ...]
    extra_ids: tuple[int, ...] | None = None
    lora_id: int | None = None
    salt: int | None = None
    items: tuple[ItemPart, ...] = ()

    def __post_init__(self) -> None:
        if self.extra_ids is not None and len(self.extra_ids) != len(self.tokens):
            raise CallerError(f"one extra id a token: tokens={len(self.tokens)}, extra_ids={len(self.extra_ids)}")

    def common_prefix(self, other: "BlockContent") -> int:
        """How many leading tokens of both have equal cache; 0 if anything but the tokens differs (core spec D53).

        Blocks with different items share nothing: an item that starts in the block does not say at which token.
        """
        if (self.extra_ids is None) != (other.extra_ids is None) or self._scope != other._scope:
            return 0
        pairs = zip(self._unique_tokens, other._unique_tokens, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def _scope(self) -> tuple[int | None, int | None, tuple[ItemPart, ...]]:
        return self.lora_id, self.salt, self.items

    @property
    def _unique_tokens(self) -> list[tuple[int, int]]:
        return list(zip(self.tokens, self.extra_ids or (0,) * len(self.tokens), strict=True))


def chop(
    tokens: Sequence[Token], num_usable: int, tokens_per_block: int, *, allow_partial: bool
) -> list[tuple[Token, ...]]:
    """The first `num_usable` tokens in runs of `tokens_per_block`; a shorter last run only with `allow_partial`.

    A number below 1 gives no run. Raises CallerError if there are fewer tokens (core spec 1.5).
    """
    if num_usable > len(tokens):
        raise CallerError(f"more tokens usable than present: num_usable={num_usable}, num_tokens={len(tokens)}")
    stop = max(num_usable, 0) if allow_partial else max(num_usable, 0) // tokens_per_block * tokens_per_block
    return [tuple(tokens[at : min(at + tokens_per_block, stop)]) for at in range(0, stop, tokens_per_block)]


def item_digest(words: Sequence[int]) -> bytes:
    """32 bytes from eight 32-bit integers (signed or not), each most significant byte first."""
    if len(words) != DIGEST_WORDS:
        raise CallerError(f"a digest has {DIGEST_WORDS} words: ours={DIGEST_WORDS}, theirs={len(words)}")
    return b"".join((word % (1 << _WORD_BITS)).to_bytes(4, "big") for word in words)


def item_parts(
    digests: Sequence[Sequence[int]], positions: Sequence[int], lengths: Sequence[int], tokens: Span
) -> tuple[ItemPart, ...]:
    """The items that overlap `tokens`, in the order given, each with the offset at which the span meets it.

    Item k has `digests[k]` (eight 32-bit integers) and covers prompt tokens `positions[k]` on, `lengths[k]` of them.
    Raises CallerError for lists of unequal length: to ignore them would let different images share cache (D13).
    """
    _check_items(digests, positions, lengths)
    return tuple(
        ItemPart(item_digest(words), max(0, tokens.start - position))
        for words, position, length in zip(digests, positions, lengths, strict=True)
        if tokens.stop > position and tokens.start < position + length
    )


def scope_items(
    digests: Sequence[Sequence[int]], positions: Sequence[int], lengths: Sequence[int]
) -> tuple[tuple[bytes, int], ...]:
    """The same lists as `kv_core.keys.Scope.extras`: digest and first token of each item.

    A chained key covers all tokens from an item's first one on, so its length needs no place in it. Raises CallerError
    for lists of unequal length (core spec D13) or an item without tokens.
    """
    _check_items(digests, positions, lengths)
    if any(length < 1 for length in lengths):
        raise CallerError(f"an item covers at least one token: lengths={list(lengths)}")
    return tuple((item_digest(words), position) for words, position in zip(digests, positions, strict=True))


def _check_items(digests: Sequence[Sequence[int]], positions: Sequence[int], lengths: Sequence[int]) -> None:
    if not len(digests) == len(positions) == len(lengths):
        counts = f"digests={len(digests)}, positions={len(positions)}, lengths={len(lengths)}"
        raise CallerError(f"one digest, position and length an item: {counts}")
