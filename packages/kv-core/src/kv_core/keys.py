"""Names for cache content: equal keys mean equal keys and values in the cache.

In:  the tokens of a request and the Scope in which they may be shared.
Out: one `BlockKey` for each full block, chained from the first block on, or one key for the whole prompt.
Law: a key covers everything that decides a block's content: all tokens up to its end, the LoRA adapter, the salt, and
     the multimodal items that began before its end. Matches are not compared token by token afterwards, and prompts are
     chosen by strangers, so a key is a full SHA-256 over an encoding that can be read in one way only (core spec D50).

    scope key   = H("scope",  lora?, salt?)
    block key i = H("block",  parent, tokens of block i, items starting in block i)       parent of block 0: scope key
    prompt key  = H("prompt", scope key, all tokens, all items)

Tokens are signed 32-bit little-endian and preceded by their count; texts and digests are preceded by their length; an
optional text is preceded by one byte that tells whether it is there. An item's offset is counted from the first token
of what is hashed, so that a block's key does not depend on the block size of the blocks before it.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NewType, cast

from kv_core.errors import CallerError
from kv_core.spans import Span

if TYPE_CHECKING:
    from hashlib import _Hash

BlockKey = NewType("BlockKey", bytes)
"""32 bytes that name a block's content, or a whole prompt's."""

KEY_BYTES: Final = 32
TOKEN_BYTES: Final = 4

_SCOPE_TAG: Final = b"kvferry scope 1\0"
_BLOCK_TAG: Final = b"kvferry block 1\0"
_QUALIFIED_TAG: Final = b"kvferry extra ids 1\0"
_PROMPT_TAG: Final = b"kvferry prompt 1\0"
_SIZE: Final = struct.Struct("<Q").pack
_SIZES: Final = struct.Struct("<QQ")
_NO_ITEMS: Final = _SIZE(0)


@dataclass(frozen=True, slots=True)
class Scope:
    """Who may share cache content: requests of one adapter, one salt and the same multimodal items.

    `extras` are the items as (content digest, ordinal of the first placeholder token in the prompt). An absent adapter
    or salt differs from an empty one.
    """

    lora: str | None = None
    salt: str | None = None
    extras: tuple[tuple[bytes, int], ...] = ()

    def __post_init__(self) -> None:
        for digest, start in self.extras:
            if not digest or start < 0:
                raise CallerError(f"an item needs a digest and a start >= 0: digest={digest.hex()!r}, start={start}")


def block_keys(tokens: Sequence[int], scope: Scope, tokens_per_block: int) -> list[BlockKey]:
    """The keys of the full blocks of `tokens`, first block first; a shorter last block has none.

    Raises CallerError for a token outside of signed 32 bits or a block of no tokens.
    """
    if tokens_per_block < 1:
        raise CallerError(f"a block holds at least one token: tokens_per_block={tokens_per_block}")
    stop = len(tokens) // tokens_per_block
    items = encoded_items(scope, tokens_per_block)
    packed = _packed(tokens[: stop * tokens_per_block])
    return chain_keys(scope_key(scope), packed, tokens_per_block * TOKEN_BYTES, Span(0, stop), items)


def chain_keys(
    parent: BlockKey,
    content: bytes,
    block_bytes: int,
    ordinals: Span,
    items: Mapping[int, bytes],
    *,
    plain: bool = True,
) -> list[BlockKey]:
    """The keys of the blocks `ordinals`, whose tokens are `content`, behind a block (or scope) of key `parent`.

    The last block may be shorter. `items` are those of `encoded_items`. If not `plain`, a token has 16 bytes, as
    TokenLog packs tokens with extra ids.
    """
    fresh = sha256(_BLOCK_TAG if plain else _QUALIFIED_TAG).copy
    if items or len(content) % block_bytes:
        return _chain_slowly(fresh, parent, content, block_bytes, ordinals, items)
    size, above = _SIZE(block_bytes), bytes(parent)
    keys: list[bytes] = []
    for first in range(0, len(content), block_bytes):  # 0.5 us a block, of which 0.4 is SHA-256 and its set-up
        state = fresh()
        state.update(above + size + content[first : first + block_bytes] + _NO_ITEMS)
        above = state.digest()
        keys.append(above)
    return cast(list[BlockKey], keys)


def _chain_slowly(
    fresh: Callable[[], "_Hash"],
    parent: BlockKey,
    content: bytes,
    block_bytes: int,
    ordinals: Span,
    items: Mapping[int, bytes],
) -> list[BlockKey]:
    """The same where items start in some blocks, or the last block is shorter."""
    keys: list[BlockKey] = []
    for first, at in zip(range(0, len(content), block_bytes), ordinals, strict=True):
        state = fresh()
        state.update(parent + _sized(content[first : first + block_bytes]) + items.get(at, _NO_ITEMS))
        parent = BlockKey(state.digest())
        keys.append(parent)
    return keys


def encoded_items(scope: Scope, tokens_per_block: int) -> dict[int, bytes]:
    """The items that start in each block: their number, then (offset in the block, length, digest) in a fixed order."""
    starts: dict[int, list[tuple[int, bytes]]] = {}
    for digest, start in scope.extras:
        starts.setdefault(start // tokens_per_block, []).append((start % tokens_per_block, digest))
    return {ordinal: _encoded(sorted(items)) for ordinal, items in starts.items()}


def decoded_items(encoded: bytes) -> Iterator[tuple[int, bytes]]:
    """What `encoded_items` says of one block: the items that start in it, as (offset in the block, digest)."""
    at = len(_NO_ITEMS)
    while at < len(encoded):
        offset, length = _SIZES.unpack_from(encoded, at)
        at += _SIZES.size + length
        yield offset, encoded[at - length : at]


def prompt_key(tokens: Sequence[int], scope: Scope) -> BlockKey:
    """One key for all `tokens`, whatever the block size; two engines of different shape agree on it.

    Raises CallerError for a token outside of signed 32 bits or an item that starts behind the last token.
    """
    items = _items(scope, 0, len(tokens))
    if len(items) != len(scope.extras):
        raise CallerError(f"an item starts behind the prompt: num_tokens={len(tokens)}, starts={_starts(scope)}")
    return BlockKey(sha256(_PROMPT_TAG + scope_key(scope) + _sized(_packed(tokens)) + _encoded(items)).digest())


def scope_key(scope: Scope) -> BlockKey:
    """The key that stands before the first block: adapter and salt."""
    return BlockKey(sha256(_SCOPE_TAG + _optional(scope.lora) + _optional(scope.salt)).digest())


def _packed(tokens: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        raise CallerError(f"a token id is a signed 32-bit integer: {error}") from error


def _items(scope: Scope, start: int, stop: int) -> list[tuple[int, bytes]]:
    """The items that begin in [start, stop), as (offset from `start`, digest) in a fixed order."""
    return sorted((at - start, digest) for digest, at in scope.extras if start <= at < stop)


def _starts(scope: Scope) -> list[int]:
    return [start for _, start in scope.extras]


def _encoded(items: list[tuple[int, bytes]]) -> bytes:
    return _SIZE(len(items)) + b"".join(_SIZE(offset) + _sized(digest) for offset, digest in items)


def _optional(text: str | None) -> bytes:
    return b"\0" if text is None else b"\1" + _sized(text.encode())


def _sized(content: bytes) -> bytes:
    return _SIZE(len(content)) + content
