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
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, NewType

from kv_core.errors import CallerError

BlockKey = NewType("BlockKey", bytes)
"""32 bytes that name a block's content, or a whole prompt's."""

KEY_BYTES: Final = 32
TOKEN_BYTES: Final = 4

_SCOPE_TAG: Final = b"kvferry scope 1\0"
_BLOCK_TAG: Final = b"kvferry block 1\0"
_PROMPT_TAG: Final = b"kvferry prompt 1\0"


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
    packed = _packed(tokens)
    keys: list[BlockKey] = []
    parent = _scope_key(scope)
    for start in range(0, len(tokens) - tokens_per_block + 1, tokens_per_block):
        stop = start + tokens_per_block
        parent = _digest(
            _BLOCK_TAG, parent, packed[start * TOKEN_BYTES : stop * TOKEN_BYTES], _items(scope, start, stop)
        )
        keys.append(parent)
    return keys


def prompt_key(tokens: Sequence[int], scope: Scope) -> BlockKey:
    """One key for all `tokens`, whatever the block size; two engines of different shape agree on it.

    Raises CallerError for a token outside of signed 32 bits or an item that starts behind the last token.
    """
    items = _items(scope, 0, len(tokens))
    if len(items) != len(scope.extras):
        raise CallerError(f"an item starts behind the prompt: num_tokens={len(tokens)}, starts={_starts(scope)}")
    return _digest(_PROMPT_TAG, _scope_key(scope), _packed(tokens), items)


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


def _scope_key(scope: Scope) -> BlockKey:
    return BlockKey(sha256(_SCOPE_TAG + _optional(scope.lora) + _optional(scope.salt)).digest())


def _digest(tag: bytes, parent: BlockKey, packed_tokens: bytes, items: list[tuple[int, bytes]]) -> BlockKey:
    digest = sha256(tag + parent + _sized(packed_tokens))
    digest.update(struct.pack("<Q", len(items)))
    for offset, item in items:
        digest.update(struct.pack("<Q", offset) + _sized(item))
    return BlockKey(digest.digest())


def _optional(text: str | None) -> bytes:
    return b"\0" if text is None else b"\1" + _sized(text.encode())


def _sized(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content
