"""The blob of a card: damage never reaches a transport."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import CallerError
from kv_transfer.agent.blob import pack_blob, unpack_blob

PACKED = pack_blob(b"t" * 16, b"how to reach us" * 5)


def test_a_blob_comes_back() -> None:
    blob = unpack_blob(PACKED)
    assert (blob.token, blob.transport) == (b"t" * 16, b"how to reach us" * 5)


@pytest.mark.parametrize("position", range(len(PACKED)))
def test_one_changed_byte_is_noticed(position: int) -> None:
    changed = bytearray(PACKED)
    changed[position] ^= 0x10
    with pytest.raises(CallerError, match="blob"):
        unpack_blob(bytes(changed))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(packed: bytes) -> None:
    with pytest.raises(CallerError, match="blob"):
        unpack_blob(packed)
