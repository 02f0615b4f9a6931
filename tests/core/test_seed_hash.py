"""The 64-bit hash against the vectors of core spec 2.2, and the weaknesses for which we do not decide by it."""

import pytest

from kv_core.content import BlockContent, ItemPart
from kv_core.keys import Scope, block_keys
from kv_core.seed_hash import seed_hash, seed_hash_chain

FIRST, SECOND = (1, 2, 3, 4), (5, 6, 7, 8)
EXTRAS = (0, 0, 9, 9)
DIGEST = bytes(range(32))
A, C, F = 0x0003488F88096B5F, 0x3A3B8CB4C5C7808C, 0xB4B6305C0A71967D


@pytest.mark.parametrize(
    ("content", "parent", "expected"),
    [
        (BlockContent(FIRST), 0, A),
        (BlockContent(SECOND), A, 0x25DC6FD9C31E4D5E),
        (BlockContent(FIRST, salt=42), 0, C),
        (BlockContent(SECOND, salt=42), C, 0xFC9EAEA94BA44157),
        (BlockContent(SECOND), C, 0xFC9EAEA94BA44157),
        (BlockContent(FIRST, lora_id=7), 0, 0x13826EA675A5E03B),
        (BlockContent(FIRST, extra_ids=EXTRAS), 0, 0x9AE78C5CB5833C9A),
        (BlockContent((1, 2, 100000, 100000), items=(ItemPart(DIGEST, 0),)), 0, F),
        (BlockContent((100000,) * 4, items=(ItemPart(DIGEST, 2),)), F, 0xC455AF7D2E36943E),
        (BlockContent(FIRST, EXTRAS, 7, 42, (ItemPart(DIGEST, 0),)), 0, 0xAAC6989698C1E54B),
        (BlockContent(()), 0, 0x0),
        (BlockContent(()), A, 0x977014FEC07692A7),
        (BlockContent((-1,)), 0, 0xBE600249),
    ],
    ids=["A", "B", "C", "C2", "C2-no-salt", "D", "E", "F", "G", "H", "I", "J", "K"],
)
def test_vectors(content, parent, expected):
    assert seed_hash(content, parent) == expected


def test_chain():
    assert seed_hash_chain([BlockContent(FIRST), BlockContent(SECOND)]) == [A, 0x25DC6FD9C31E4D5E]


def test_collisions_that_our_keys_do_not_have():
    """Core spec D50: two-token blocks collide, and an extra id of 0 equals an adapter of 0."""
    one, two = (83779, 39689), (90735, 25369)
    assert seed_hash(BlockContent(one)) == seed_hash(BlockContent(two)) == 0x0C0FE2302
    assert block_keys(one, Scope(), 2) != block_keys(two, Scope(), 2)
    assert seed_hash(BlockContent((77,), extra_ids=(0,))) == seed_hash(BlockContent((77,), lora_id=0)) == 0x160DEB20C7
    assert len({block_keys((77,), scope, 1)[0] for scope in (Scope(), Scope(lora="0"), Scope(salt="0"))}) == 3
