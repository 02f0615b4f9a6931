"""Traces of requests as chains of block names, and what any cache could at best find again in them.

In:  Mooncake-format files: one JSON object a line with `timestamp` (ms), `input_length` (tokens) and `hash_ids`, each
     of which names one run of tokens of the prompt, chained: equal leading ids are an equal prefix.
Out: `TraceRequest` values; hits of a cache without bounds, and of one that knows the future.
Law: a hit is a leading block that is present with all blocks before it. No eviction order of the same capacity finds
     more than `clairvoyant_hits`, and none of any capacity more than `ceiling_hits`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from typing import Any

from kv_core.errors import CallerError
from kv_core.spans import ceil_div

NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """When a request came (ms since the start), and the names of its prompt's blocks; the last one may be partial."""

    at_ms: int
    blocks: tuple[int, ...]


def read_trace(path: Path, tokens_per_id: int = 512, tokens_per_block: int | None = None) -> Iterator[TraceRequest]:
    """Requests in the order of the file, in blocks of `tokens_per_block` (that of the ids when None).

    A smaller block has to divide the ids' size: each id then names several blocks. CallerError, with the line's number,
    for a line that is no request.
    """
    per_id = _blocks_per_id(tokens_per_id, tokens_per_id if tokens_per_block is None else tokens_per_block)
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parsed(path, number, line, tokens_per_id, per_id)


def ceiling_hits(requests: Iterable[TraceRequest]) -> int:
    """Hits in blocks when nothing is ever given up."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += leading(request.blocks, seen)
        seen.update(request.blocks)
    return hits


def leading(blocks: Sequence[int], present: set[int]) -> int:
    """How many leading blocks are present."""
    for ordinal, block in enumerate(blocks):
        if block not in present:
            return ordinal
    return len(blocks)


def clairvoyant_hits(requests: Sequence[TraceRequest], num_blocks: int) -> int:
    """Hits in blocks of a cache of `num_blocks` that gives up the block whose next use is farthest away (Belady).

    A request holds all its blocks while it runs, like in a real cache; one longer than the cache is not admitted. A
    block is used again whenever a block behind it is, so a chain is given up from its end without further ado. Uses by
    requests that are not admitted count as well, so this may fall short of the best choice; it never exceeds it.
    """
    upcoming = _next_uses(requests)
    due: dict[int, int] = {}
    queue: list[tuple[int, int, int]] = []
    present: set[int] = set()
    hits = 0
    for request, uses in zip(requests, upcoming, strict=True):
        if len(request.blocks) > num_blocks:
            continue
        hits += leading(request.blocks, present)
        held = set(request.blocks)
        _make_room(present, held, due, queue, num_blocks)
        present |= held
        for ordinal, (block, use) in enumerate(zip(request.blocks, uses, strict=True)):
            due[block] = use
            heappush(queue, (-use, -ordinal, block))
    return hits


def _make_room(
    present: set[int], held: set[int], due: dict[int, int], queue: list[tuple[int, int, int]], num_blocks: int
) -> None:
    """Give up blocks that are not held until the rest fits beside `held`; stale and held entries are dropped.

    A held block gets a new entry when its request is over.
    """
    excess = len(present) + sum(block not in present for block in held) - num_blocks
    while excess > 0:
        use, _, block = heappop(queue)
        if block in present and block not in held and due[block] == -use:
            present.remove(block)
            excess -= 1


def _next_uses(requests: Sequence[TraceRequest]) -> list[list[int]]:
    """For each block of each request, the number of the next request that uses it."""
    following: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number].blocks
        uses.append([following.get(block, NEVER) for block in blocks])
        following.update(dict.fromkeys(blocks, number))
    return uses[::-1]


def _blocks_per_id(tokens_per_id: int, tokens_per_block: int) -> int:
    if tokens_per_block < 1 or tokens_per_id % tokens_per_block:
        raise CallerError(f"blocks divide what an id names: id={tokens_per_id}, block={tokens_per_block}")
    return tokens_per_id // tokens_per_block


def _parsed(path: Path, number: int, line: str, tokens_per_id: int, per_id: int) -> TraceRequest:
    try:
        row: dict[str, Any] = json.loads(line)
        at_ms, length, ids = int(row["timestamp"]), int(row["input_length"]), [int(one) for one in row["hash_ids"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CallerError(f"{path}, line {number} is no request: {error}") from error
    if len(ids) != ceil_div(length, tokens_per_id):
        raise CallerError(f"{path}, line {number}: {length} tokens in {len(ids)} ids of {tokens_per_id} tokens")
    if per_id == 1:
        return TraceRequest(at_ms, tuple(ids))
    num_blocks = ceil_div(length * per_id, tokens_per_id)
    parts = (one * per_id + part for one in ids for part in range(per_id))
    return TraceRequest(at_ms, tuple(islice(parts, num_blocks)))
