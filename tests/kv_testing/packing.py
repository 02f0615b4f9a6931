"""Tokens and items as the bytes that kv_core keeps and hashes, written anew and slowly.

In:  token ids, extra ids, encoded items.
Out: bytes, and what bytes say.
Law: 32 bits a token, or 128 with extra ids, little-endian (see `kv_core.token_log` and `kv_core.keys`).
"""

import struct


def decoded(content, width):
    if width == 4:
        return [(int.from_bytes(content[at : at + 4], "little"), 0) for at in range(0, len(content), 4)]
    return [
        (int.from_bytes(content[at : at + 8], "little"), int.from_bytes(content[at + 8 : at + 16], "little"))
        for at in range(0, len(content), 16)
    ]


def packed_tokens(tokens, extra_ids):
    """Tokens as they are kept, with the extra ids of the first ones if there are any."""
    ids = [token & 0xFFFFFFFF for token in tokens]
    if extra_ids is None:
        return struct.pack(f"<{len(ids)}I", *ids)
    return b"".join(struct.pack("<QQ", *pair) for pair in zip(ids, extra_ids, strict=False))


def decoded_items(items):
    found = []
    at = 8
    while at < len(items):
        offset = int.from_bytes(items[at : at + 8], "little")
        size = int.from_bytes(items[at + 8 : at + 16], "little")
        found.append((offset, items[at + 16 : at + 16 + size]))
        at += 16 + size
    return tuple(found)


def packed(tokens, items, width):
    """The order of bytes in which the real manager keeps siblings."""
    if width is None:
        found = b"".join(struct.pack("<I", token) for token, _ in tokens)
    else:
        found = b"".join(struct.pack("<QQ", token, extra) for token, extra in tokens)
    if items:
        found += struct.pack("<Q", len(items))
        for offset, digest in items:
            found += struct.pack("<QQ", offset, len(digest)) + digest
    return found
