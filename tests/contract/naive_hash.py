"""The seed's block hash, word by word as the specification writes it (core spec 2.1).

In:  keys as the cases have them.
Out: 64-bit hashes in hex, each chained to the one before.
Law: nothing of kv_core's hash is used.
"""

from typing import Any

WORD, LONG = (1 << 32) - 1, (1 << 64) - 1
GOLDEN = 0x9E3779B9


def mix_32(value: int) -> int:
    for _ in range(2):
        value = ((value >> 16) ^ value) * 0x45D9F3B & WORD
    return (value >> 16) ^ value


def mix_64(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & LONG
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & LONG
    return value ^ (value >> 31)


def fold(state: int, mixed: int, bits: int) -> int:
    first = (mixed + GOLDEN) & (WORD if bits == 32 else LONG)
    return state ^ ((first + (state << 6) + (state >> 2)) & LONG)


def naive_hash(key: dict[str, Any], parent: int) -> int:
    state = len(key["tokens"]) ^ (parent * 0xBF58476D1CE4E5B9 & LONG)
    if parent == 0 and key.get("salt") is not None:
        state = fold(state, mix_64(key["salt"]), 64)
    for at, token in enumerate(key["tokens"]):
        state = fold(state, mix_32(token & WORD), 32)
        if key.get("extra_ids") is not None:
            state = fold(state, mix_64(key["extra_ids"][at]), 64)
    if key.get("lora_id") is not None:
        state = fold(state, mix_64(key["lora_id"]), 64)
    for digest, offset in key.get("mm_keys") or ():
        raw = bytes.fromhex(digest)
        for at in range(0, 32, 4):
            state = fold(state, mix_32(int.from_bytes(raw[at : at + 4], "little")), 32)
        state = fold(state, mix_64(offset), 64)
    return state


def naive_chain(keys: list[dict[str, Any]]) -> list[str]:
    hashes, parent = list[str](), 0
    for key in keys:
        parent = naive_hash(key, parent)
        hashes.append(f"0x{parent:016x}")
    return hashes
