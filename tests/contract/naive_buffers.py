"""How many targets find room in one buffer, worked out twice: by the seed's slices, and by halving.

In:  the bytes of the buffer and of each target.
Out: the sizes that find room at once.
Law: nothing of the code under test is used. The seed: transfer spec 7.5; ours: powers of two of a page, lowest first.
"""

from collections.abc import Sequence
from typing import Any

PAGE = 4096


def sliced(buffer_bytes: int, sizes: Sequence[int]) -> list[int]:
    """The seed's: one after the other while they fit; one that does not is passed over."""
    found, used = [], 0
    for size in sizes:
        if used + size <= buffer_bytes:
            found.append(size)
            used += size
    return found


def halved(buffer_bytes: int, sizes: Sequence[int]) -> list[int]:
    """Ours: the smallest free power of two that holds the size, halved as long as a half does too."""
    pages = buffer_bytes // PAGE
    free = [(1 << bit, pages >> (bit + 1) << (bit + 1)) for bit in range(pages.bit_length()) if pages & (1 << bit)]
    found = []
    for size in sizes:
        wanted = 1
        while wanted * PAGE < size:
            wanted *= 2
        fitting = [block for block in free if block[0] >= wanted]
        if not fitting:
            continue
        length, start = min(fitting)
        free.remove((length, start))
        while length > wanted:
            length //= 2
            free.append((length, start + length))
        found.append(size)
    return found


HELPERS: dict[str, Any] = {"sliced": sliced, "halved": halved, "item_bytes": {"float": 4, "half": 2, "int8": 1}}
"""What rules may use beside their case's values."""
