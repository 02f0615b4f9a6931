"""Events as JSON: the form of each kind, the seed's hashes for those who want them, and what cannot be told so."""

import json

import pytest

from kv_core.errors import CallerError
from kv_core.event_json import SeedNames, events_to_json
from kv_core.events import Change, Created, Event, Removed, Reset, Stored, StoredPiece, Updated
from kv_core.keys import BlockKey, Scope

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


@pytest.mark.parametrize("scope", [Scope(lora="sql"), Scope(salt="tenant"), Scope(extras=((b"i", 0),))])
def test_what_the_seed_cannot_hash(scope):
    with pytest.raises(CallerError):
        told(stored(scope), names=SeedNames())
