"""The largest chunk a rank offers, and its arenas: as configured, else by its device."""

import pytest

from kv_transfer.config import ConfigError, TransferConfig, default_arena_bytes, default_chunk_bytes
from kv_transfer.thresholds import MIB


def test_a_gpu_gets_larger_chunks():
    assert default_chunk_bytes("cuda") == 256 * MIB
    assert default_chunk_bytes("cpu") == 8 * MIB


@pytest.mark.parametrize(
    ("device_gib", "arena_mib"), [(None, 256), (8, 256), (24, 256), (32, 512), (80, 1024), (141, 2048), (1000, 2048)]
)
def test_an_arena_is_a_small_part_of_a_gpu(device_gib, arena_mib):
    assert default_arena_bytes(device_gib and device_gib << 30) == arena_mib * MIB


def test_small_arenas_need_no_word_on_chunks():
    assert TransferConfig(send_arena_bytes=MIB, receive_arena_bytes=MIB).chunk_bytes is None


def test_a_chunk_that_was_asked_for_must_fit():
    for field in ("send_arena_bytes", "receive_arena_bytes"):
        both = f"chunk_bytes={2 * MIB}, {field}={MIB}; raise {field}, or lower chunk_bytes"
        with pytest.raises(ConfigError, match=both):
            TransferConfig(chunk_bytes=2 * MIB, **{field: MIB})


def test_an_arena_that_nobody_asked_for_grows_with_the_chunk():
    assert TransferConfig(chunk_bytes=257 * MIB).send_arena_bytes is None
    assert default_arena_bytes(None, 257 * MIB) == 514 * MIB
    assert default_arena_bytes(None, 8 * MIB) == default_arena_bytes(None) == 256 * MIB
    assert default_arena_bytes(141 << 30, 512 * MIB) == 2048 * MIB
