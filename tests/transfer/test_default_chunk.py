"""The largest chunk a rank offers: as configured, else by its device and arenas."""

import pytest

from kv_transfer.config import ConfigError, TransferConfig, default_chunk_bytes
from kv_transfer.thresholds import MIB


def test_a_gpu_gets_larger_chunks():
    assert default_chunk_bytes("cuda") == 64 * MIB
    assert default_chunk_bytes("cpu") == 8 * MIB


def test_small_arenas_need_no_word_on_chunks():
    assert TransferConfig(send_arena_bytes=MIB, receive_arena_bytes=MIB).chunk_bytes is None


def test_a_chunk_that_was_asked_for_must_fit():
    with pytest.raises(ConfigError, match="send_arena_bytes is out of range"):
        TransferConfig(chunk_bytes=2 * MIB, send_arena_bytes=MIB)
