"""Events as JSON: the form of each kind, the seed's hashes for those who want them, and what cannot be told so."""

import json

import pytest

from kv_core.content import BlockContent, item_parts, scope_items
from kv_core.errors import CallerError
from kv_core.event_json import SeedNames, events_to_json
from kv_core.events import Change, Created, Event, Removed, Reset, Stored, StoredPiece, Updated
from kv_core.keys import BlockKey, Scope
from kv_core.seed_hash import seed_hash, seed_hash_chain
from kv_core.spans import Span
from kv_testing.managers import manager, run

A, B = BlockKey(b"a" * 32), BlockKey(b"b" * 32)
HASHES = 0x0003488F88096B5F, 0x25DC6FD9C31E4D5E  # core spec 2.2, A and B


def packed(*tokens):
    return b"".join(token.to_bytes(4, "little") for token in tokens)


PUBLIC = Scope()


def stored(scope=PUBLIC, parent=None, keys=(A, B), tokens=range(1, 9)):
    return Stored(parent, scope, (StoredPiece(keys, packed(*tokens), 4, 4, 0, 35),))


def told(*payloads, names=None):
    events = [Event(number, 16, payload) for number, payload in enumerate(payloads)]
    return [json.loads(json.dumps(one)) for one in events_to_json(events, names)]


def test_frame():
    assert told(Created((8, 2))) == [
        {"event_id": 0, "window_size": 16, "data": {"type": "created", "num_blocks_per_cache_level": [8, 2]}}
    ]
    assert next(events_to_json([Event(3, 8, Reset(5), rank=1)])) == {
        "event_id": 3,
        "window_size": 8,
        "attention_dp_rank": 1,
        "data": {"type": "reset", "num_lost_events": 5},
    }


def test_stored_carries_its_namespace():  # core spec D52
    data = told(stored(Scope("7", "s", ((b"\1\2", 3),))))[0]["data"]
    assert (data["parent_hash"], data["lora_id"], data["cache_salt"]) == (None, "7", "s")
    assert data["mm_keys"] == [{"hash": "0102", "start_token": 3}]
    assert [block["block_hash"] for block in data["blocks"]] == [A.hex(), B.hex()]
    assert data["blocks"][0]["tokens"][1] == {"type": "unique_token", "token_id": 2, "token_extra_id": 0}
    assert {key: data["blocks"][1][key] for key in ("type", "cache_level", "priority")} == {
        "type": "stored_block",
        "cache_level": 0,
        "priority": 35,
    }


def test_an_absent_difference_is_null():  # core spec D22
    data = told(Updated(A, tier=Change(0, 1)))[0]["data"]
    diff = {"type": "event_diff", "new_value": 1, "old_value": 0}
    assert data == {"type": "updated", "block_hash": A.hex(), "cache_level": diff, "priority": None}


def test_hashes_of_the_seed():
    names = SeedNames()
    first, second = told(
        stored(keys=(A,), tokens=range(1, 5)), stored(parent=A, keys=(B,), tokens=range(5, 9)), names=names
    )
    assert first["data"]["blocks"][0]["block_hash"] == HASHES[0]
    assert (second["data"]["parent_hash"], second["data"]["blocks"][0]["block_hash"]) == HASHES
    assert told(Removed((B, A)), names=names)[0]["data"]["block_hashes"] == [HASHES[1], HASHES[0]]
    with pytest.raises(CallerError, match="no stored event"):
        told(Updated(A), names=names)


def test_adapter_and_salt_enter_the_hashes_of_the_seed():
    data = told(stored(Scope(salt="42"), keys=(A,), tokens=range(1, 5)), names=SeedNames())[0]["data"]
    assert data["blocks"][0]["block_hash"] == 0x3A3B8CB4C5C7808C  # core spec 2.2, C


DIGEST = bytes(range(32))


def seed_hashes(scope, tokens, lengths, extra_ids=None):
    """The hashes of blocks of four tokens, told in one event."""
    width = 4 if extra_ids is None else 16
    content = packed(*tokens)
    if extra_ids is not None:
        pairs = zip(tokens, extra_ids, strict=True)
        content = b"".join(number.to_bytes(8, "little") for pair in pairs for number in pair)
    keys = tuple(BlockKey(bytes([number]) * 32) for number in range(len(tokens) // 4))
    event = Stored(None, scope, (StoredPiece(keys, content, width, 4, 0, 35),))
    return [block["block_hash"] for block in told(event, names=SeedNames(lengths))[0]["data"]["blocks"]]


def test_items_enter_the_hashes_of_the_blocks_that_they_cover():  # core spec 2.2, F and G
    picture = Scope(extras=((DIGEST, 2),))
    tokens = [1, 2, *[100000] * 6, 5, 6, 7, 8]
    found = seed_hashes(picture, tokens, {DIGEST: 6})
    assert found[:2] == [0xB4B6305C0A71967D, 0xC455AF7D2E36943E]
    assert found[2] == seed_hash(BlockContent((5, 6, 7, 8)), found[1])


def test_all_that_qualifies_tokens_enters_the_hashes_of_the_seed():  # core spec 2.2, H
    scope = Scope("7", "42", ((DIGEST, 0),))
    assert seed_hashes(scope, [1, 2, 3, 4], {DIGEST: 4}, [0, 0, 9, 9]) == [0xAAC6989698C1E54B]


def test_an_item_of_unknown_length_is_refused_by_its_digest():
    with pytest.raises(CallerError, match=DIGEST.hex()):
        seed_hashes(Scope(extras=((DIGEST, 0),)), [1, 2, 3, 4], {b"another": 4})


def test_what_a_manager_tells_of_items_gives_the_hashes_of_the_seed():
    """Three items over five blocks, in pieces: two requests, the second of which goes on behind the first."""
    words = [[number] * 8 for number in (1, 2, 3)]
    positions, lengths = [2, 9, 11], [5, 1, 6]
    tokens = list(range(100, 121))
    items = scope_items(words, positions, lengths)
    ours = manager(12, event_buffer_size=100)
    run(ours, "a", tokens[:13], items=items[:2], salt="7")
    run(ours, "b", tokens, items=items, salt="7")
    ours.flush_events()
    known = {digest: length for (digest, _), length in zip(items, lengths, strict=True)}
    events = [one["data"] for one in events_to_json(ours.take_events(), SeedNames(known))]
    spans = [Span(at, at + 4) for at in range(0, 20, 4)]
    contents = [
        BlockContent(tuple(tokens[span.start : span.stop]), salt=7, items=item_parts(words, positions, lengths, span))
        for span in spans
    ]
    hashes = {block["block_hash"] for one in events if one["type"] == "stored" for block in one["blocks"]}
    assert set(seed_hash_chain(contents)) <= hashes
    told_items = [(one["hash"], one["start_token"]) for event in events for one in event.get("mm_keys", ())]
    assert told_items == [(digest.hex(), first) for digest, first in (items[0], items[1], items[1], items[2])], (
        "the block of the second item has another content when the third one starts in it"
    )


@pytest.mark.parametrize("scope", [Scope(lora="sql"), Scope(salt="tenant"), Scope(extras=((b"i", 0),))])
def test_what_the_seed_cannot_hash(scope):
    with pytest.raises(CallerError):
        told(stored(scope), names=SeedNames())
