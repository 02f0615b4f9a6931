"""The tokens of one request as bytes, in which all comparison happens.

In:  token ids, optionally one extra id each, and the multimodal items that start among them.
Out: `TokenLog`: the bytes, and for each block in which items start, their encoding.
Law: equal bytes and equal items mean equal content. Tokens are told once and turned to bytes once; runs of the tree
     keep parts of them without a copy. All numbers are little-endian.

    plain       32 bits a token: the id, unsigned
    extra ids   128 bits a token: the id, then the extra id
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Final

from kv_core.errors import CallerError
from kv_core.keys import Scope, encoded_items

PLAIN_BYTES: Final = 4
QUALIFIED_BYTES: Final = 16
_TOKEN_MASK: Final = 0xFFFFFFFF
_EXTRA_MASK: Final = 0xFFFFFFFFFFFFFFFF


class TokenLog:
    """All told tokens of a request. `items` maps the ordinal of a block to the encoded items that start in it.

    A token takes `width` bytes, a block `block_bytes`.
    """

    __slots__ = ("_pending", "_told", "block_bytes", "items", "width")

    def __init__(
        self, tokens: Sequence[int], scope: Scope, tokens_per_block: int, extra_ids: Sequence[int] | None = None
    ) -> None:
        self.width = PLAIN_BYTES if extra_ids is None else QUALIFIED_BYTES
        self.block_bytes = tokens_per_block * self.width
        self._told = packed(tokens) if extra_ids is None else _qualified(tokens, extra_ids)
        self._pending: list[int] = []
        self.items = encoded_items(scope, tokens_per_block) if scope.extras else {}

    def __len__(self) -> int:
        return len(self._told) // self.width + len(self._pending)

    @property
    def told(self) -> bytes:
        """All tokens."""
        if self._pending:
            pending = self._pending
            self._told += packed(pending) if self.width == PLAIN_BYTES else _qualified(pending, [0] * len(pending))
            self._pending = []
        return self._told

    def content(self, start: int, stop: int) -> bytes:
        """Tokens `start <= i < stop`."""
        return self.told[start * self.width : stop * self.width]

    def extend(self, tokens: Sequence[int]) -> None:
        """Tell the tokens that follow; CallerError, and nothing told, if one of them is not 32 bits wide."""
        if any(not -(1 << 31) <= token <= _TOKEN_MASK for token in tokens):
            raise CallerError(f"a token id has 32 bits: tokens={list(tokens)[:8]}")
        self._pending += tokens

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens behind the first `num_tokens`."""
        if num_tokens < len(self):
            self._told = self.told[: num_tokens * self.width]


def packed(tokens: Sequence[int]) -> bytes:
    """32 bits a token. CallerError for what does not fit into 32 bits.

    Evidence: array("I").fromlist takes 4 ns a token, array("I", list) 6, struct.pack 23, array("i", list) 41; copying
    the list alone takes 2.5 (CPython 3.11.7, Xeon).
    """
    words = array("I")
    try:
        words.fromlist(tokens if type(tokens) is list else list(tokens))
    except OverflowError:
        words = array("I", _masked(tokens))
    except TypeError as error:
        raise CallerError(f"a token id is an integer: {error}") from error
    return _little(words)


def unpacked(content: bytes, width: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Token ids (signed) and extra ids of packed tokens."""
    if width == PLAIN_BYTES:
        return struct.unpack(f"<{len(content) // width}i", content), None
    words = struct.unpack(f"<{len(content) // 8}Q", content)
    signed = tuple(word - (1 << 32) if word >> 31 else word for word in words[0::2])
    return signed, words[1::2]


def first_item_offset(items: bytes) -> int:
    """At which token of its block the first of some encoded items starts."""
    return int.from_bytes(items[8:16], "little")


def _qualified(tokens: Sequence[int], extra_ids: Sequence[int]) -> bytes:
    if any(not 0 <= extra <= _EXTRA_MASK for extra in extra_ids):
        raise CallerError("an extra id has 64 bits and no sign")
    words = array("Q", bytes(QUALIFIED_BYTES * len(tokens)))
    words[0::2] = array("Q", _masked(tokens))
    words[1::2] = array("Q", extra_ids)
    return _little(words)


def _masked(tokens: Sequence[int]) -> list[int]:
    if any(not -(1 << 31) <= token <= _TOKEN_MASK for token in tokens):
        raise CallerError("a token id has 32 bits")
    return [token & _TOKEN_MASK for token in tokens]


def _little(words: "array[int]") -> bytes:
    """The bytes of words, which are used up."""
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
