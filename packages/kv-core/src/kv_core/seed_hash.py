"""The 64-bit block hash of an older cache manager, for consumers of events that still speak it (core spec 2).

In:  the content of a block and the hash of the block before it.
Out: an unsigned 64-bit integer, bit for bit the one of that manager.
Law: nothing of ours decides by this hash. Short blocks have few bits in it, namespaces run into each other and anyone
     can forge it (core spec D50); ours are the keys of `kv_core.keys`.
"""

from collections.abc import Iterable
from typing import Final

from kv_core.content import BlockContent, ItemPart

NO_PARENT: Final = 0
"""Hash of the root of a reuse tree, and of "no block before this one"."""

_MASK_32: Final = 0xFFFFFFFF
_MASK_64: Final = 0xFFFFFFFFFFFFFFFF
_FACTOR: Final = 0xBF58476D1CE4E5B9
_GOLDEN: Final = 0x9E3779B9


def seed_hash(content: BlockContent, parent: int = NO_PARENT) -> int:
    """Hash of one block behind a block of hash `parent`; the salt enters in the first block only (core spec 2.1)."""
    state = (len(content.tokens) ^ parent * _FACTOR) & _MASK_64
    if parent == NO_PARENT and content.salt is not None:
        state = _fold_64(state, _mix_64(content.salt))
    state = _fold_tokens(state, content)
    if content.lora_id is not None:
        state = _fold_64(state, _mix_64(content.lora_id))
    return _fold_items(state, content.items)


def seed_hash_chain(contents: Iterable[BlockContent]) -> list[int]:
    """Hashes of consecutive blocks, the first one at the root."""
    hashes: list[int] = []
    parent = NO_PARENT
    for content in contents:
        parent = seed_hash(content, parent)
        hashes.append(parent)
    return hashes


def _fold_tokens(state: int, content: BlockContent) -> int:
    if content.extra_ids is None:
        for token in content.tokens:
            state = _fold_32(state, _mix_32(token & _MASK_32))
        return state
    for token, extra_id in zip(content.tokens, content.extra_ids, strict=True):
        state = _fold_64(_fold_32(state, _mix_32(token & _MASK_32)), _mix_64(extra_id))
    return state


def _fold_items(state: int, items: Iterable[ItemPart]) -> int:
    for item in items:
        for at in range(0, len(item.digest), 4):
            state = _fold_32(state, _mix_32(int.from_bytes(item.digest[at : at + 4], "little")))
        state = _fold_64(state, _mix_64(item.offset))
    return state


def _mix_32(value: int) -> int:
    value = ((value >> 16) ^ value) * 0x45D9F3B & _MASK_32
    value = ((value >> 16) ^ value) * 0x45D9F3B & _MASK_32
    return (value >> 16) ^ value


def _mix_64(value: int) -> int:
    value = (value ^ (value >> 30)) * _FACTOR & _MASK_64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK_64
    return value ^ (value >> 31)


def _fold_32(state: int, value: int) -> int:
    """The sum with the constant wraps at 32 bits before it is widened."""
    return state ^ (((value + _GOLDEN & _MASK_32) + (state << 6) + (state >> 2)) & _MASK_64)


def _fold_64(state: int, value: int) -> int:
    return state ^ ((value + _GOLDEN + (state << 6) + (state >> 2)) & _MASK_64)
