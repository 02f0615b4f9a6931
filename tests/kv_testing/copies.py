"""Drawn copies between planes and a dense view, and the model that says what they must give.

Law: the model loops over single elements of a plain list and shares no code with what it judges.
"""

from dataclasses import dataclass
from random import Random
from typing import TypedDict

import torch
from torch import Tensor

WIDTHS = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

TOKEN_MAJOR = "BTHD"
HEAD_MAJOR = "BHTD"
TRANSPOSED = "BHDT"

# (element bytes, head size, memory of the planes, of the dense view, bytes of the words that must be used).
# Words are the widest that divide a row, every stride and every address; a transposed plane allows only its elements.
WAYS = [
    (1, 1, TOKEN_MAJOR, TOKEN_MAJOR, 1),
    (1, 3, HEAD_MAJOR, TOKEN_MAJOR, 1),
    (1, 6, TOKEN_MAJOR, HEAD_MAJOR, 2),
    (1, 16, HEAD_MAJOR, HEAD_MAJOR, 16),
    (2, 5, HEAD_MAJOR, TOKEN_MAJOR, 2),
    (2, 6, TOKEN_MAJOR, TOKEN_MAJOR, 4),
    (2, 12, HEAD_MAJOR, HEAD_MAJOR, 8),
    (2, 40, TOKEN_MAJOR, HEAD_MAJOR, 16),
    (2, 8, TRANSPOSED, HEAD_MAJOR, 2),
    (4, 3, TOKEN_MAJOR, HEAD_MAJOR, 4),
    (4, 4, HEAD_MAJOR, TOKEN_MAJOR, 16),
    (4, 4, TRANSPOSED, TRANSPOSED, 4),
    (8, 1, TOKEN_MAJOR, TOKEN_MAJOR, 8),
    (8, 3, HEAD_MAJOR, HEAD_MAJOR, 8),
    (8, 2, TOKEN_MAJOR, HEAD_MAJOR, 16),
]


class Window(TypedDict):
    first_token: int
    first_head: int


@dataclass(frozen=True)
class Copy:
    """Arguments of one gather or scatter, planes and dense view filled with random bytes."""

    planes: list[Tensor]
    dense: Tensor
    block_ids: list[int]
    first_token: int
    first_head: int

    @property
    def window(self) -> "Window":
        return {"first_token": self.first_token, "first_head": self.first_head}


def draw_copy(random: Random, width: int, memories: tuple[str, str], head_size: int, device: str = "cpu") -> Copy:
    """A copy in these memory orders (planes, dense view), with random block size, gaps between blocks, partial
    first and last blocks and part of the heads."""
    num_blocks, tokens, heads = random.randint(2, 7), random.choice([1, 2, 3, 5]), random.randint(1, 4)
    block_ids = random.sample(range(num_blocks), random.randint(1, num_blocks))
    held = len(block_ids) * tokens
    first_token = random.randrange(held)
    num_tokens = random.randint(1, held - first_token)
    first_head = random.randrange(heads)
    num_heads = random.randint(1, heads - first_head)
    num_planes = random.randint(1, 3)
    sizes = {"B": num_blocks, "T": tokens, "H": heads, "D": head_size}
    torch.manual_seed(random.getrandbits(32))
    gap = random.choice([0, 1])
    planes = [strided(memories[0], sizes, width, gap, device) for _ in range(num_planes)]
    dense_sizes = {"B": num_planes, "T": num_tokens, "H": num_heads, "D": head_size}
    dense = strided(memories[1], dense_sizes, width, 0, device)
    return Copy(planes, dense, block_ids, first_token, first_head)


def strided(memory: str, sizes: dict[str, int], width: int, gap: int, device: str) -> Tensor:
    """A view [B, T, H, D] over memory whose axes lie in the given order; `gap` unused rows of B follow each block."""
    shape = [sizes[axis] for axis in memory]
    shape[0] *= 1 + gap
    words = torch.randint(-(2**31), 2**31, (*shape[:-1], shape[-1] * width), dtype=torch.int64).to(torch.uint8)
    whole = words.to(device).view(-1).view(WIDTHS[width]).view(shape)
    return whole.permute(*(memory.index(axis) for axis in "BTHD"))[:: 1 + gap]


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, which compare by their bits."""
    return tensor.view(WORDS[tensor.dtype.itemsize])


def gathered(copy: Copy) -> list[list[list[list[int]]]]:
    """What the dense view must hold, element by element: [plane][token][head][d]."""
    return [[[row.tolist() for row in heads] for heads in _cells(plane, copy)] for plane in copy.planes]


def scattered(copy: Copy) -> list[Tensor]:
    """What the planes must hold."""
    results = [bits(plane).clone() for plane in copy.planes]
    for result, dense in zip(results, bits(copy.dense), strict=True):
        for token, heads in enumerate(dense):
            ordinal, slot = divmod(copy.first_token + token, result.shape[1])
            for head, row in enumerate(heads):
                for d, element in enumerate(row.tolist()):
                    result[copy.block_ids[ordinal], slot, copy.first_head + head, d] = element
    return results


def _cells(plane: Tensor, copy: Copy) -> list[list[Tensor]]:
    _, num_tokens, num_heads, _ = copy.dense.shape
    positions = [divmod(copy.first_token + token, plane.shape[1]) for token in range(num_tokens)]
    heads = range(copy.first_head, copy.first_head + num_heads)
    return [[bits(plane)[copy.block_ids[ordinal], slot, head] for head in heads] for ordinal, slot in positions]


@dataclass(frozen=True)
class BlockCopy:
    """Arguments of one copy between two paged caches, both filled with random bytes."""

    planes: list[Tensor]
    block_ids: list[int]
    source: list[Tensor]
    source_ids: list[int]
    num_tokens: int
    num_heads: int
    at: tuple[int, int]
    source_at: tuple[int, int]


def draw_block_copy(
    random: Random, width: int, memories: tuple[str, str], head_size: int, device: str = "cpu"
) -> BlockCopy:
    """A copy in these memory orders (ours, theirs); block sizes, heads and beginnings differ or agree by chance."""
    num_planes, num_heads = random.randint(1, 3), random.randint(1, 3)
    num_tokens = random.randint(1, 13)
    torch.manual_seed(random.getrandbits(32))
    sides = []
    for memory in memories:
        tokens, first_token, first_head = random.choice([1, 2, 4, 8]), random.randint(0, 9), random.randint(0, 2)
        needed = -(-(first_token + num_tokens) // tokens)
        sizes = {"B": needed + 2, "T": tokens, "H": first_head + num_heads + random.randint(0, 1), "D": head_size}
        planes = [strided(memory, sizes, width, 0, device) for _ in range(num_planes)]
        sides.append((planes, random.sample(range(needed + 2), needed), (first_token, first_head)))
    (planes, ids, at), (source, source_ids, source_at) = sides
    return BlockCopy(planes, ids, source, source_ids, num_tokens, num_heads, at, source_at)


def block_copied(copy: BlockCopy) -> list[Tensor]:
    """What our planes must hold."""
    results = [bits(plane).clone() for plane in copy.planes]
    for result, source in zip(results, map(bits, copy.source), strict=True):
        for token in range(copy.num_tokens):
            ordinal, slot = divmod(copy.at[0] + token, result.shape[1])
            from_ordinal, from_slot = divmod(copy.source_at[0] + token, source.shape[1])
            for head in range(copy.num_heads):
                row = source[copy.source_ids[from_ordinal], from_slot, copy.source_at[1] + head]
                result[copy.block_ids[ordinal], slot, copy.at[1] + head] = row
    return results
