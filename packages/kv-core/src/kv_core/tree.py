"""The reuse tree of one window: runs of blocks under one root a scope.

In:  the tokens of requests.
Out: matches, which change nothing and hold nothing; linked, cut and unlinked runs.
Law: a child begins with the bytes under which its parent knows it, and starts where its parent stops. A block that is
     not full, and one in which items start, is a run of its own. No recursion: depth is bounded by memory only.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from kv_core.keys import Scope, decoded_items
from kv_core.runs import Run
from kv_core.token_log import TokenLog, first_item_offset

ScopeKey = tuple[str | None, str | None, int]

SIBLING_REACH: Final = 16
"""How many children on each side of a block are looked at for a partial match: bounds what many siblings cost."""


class Root(Run):
    """The start of all chains of one scope. It stays while it has children or a table begins at it."""

    __slots__ = ("scope", "scope_key")

    def __init__(self, scope: Scope, scope_key: ScopeKey) -> None:
        super().__init__(None, 0, b"", array("i"))
        self.scope = scope
        self.scope_key = scope_key

    @property
    def width(self) -> int:
        """Bytes a token."""
        return self.scope_key[2]

    def scope_of(self, runs: Iterable[Run]) -> Scope:
        """The scope of some chain below, with the items that start in its runs."""
        items = [run for run in runs if run.items]
        if not items:
            return self.scope
        extras = (
            (digest, run.start * run.block_bytes // self.width + offset)
            for run in items
            for offset, digest in decoded_items(run.items)
        )
        return Scope(self.scope.lora, self.scope.salt, tuple(extras))


class Source(NamedTuple):
    """A block whose first `num_tokens` tokens are wanted: number `inside` of `run`."""

    run: Run
    inside: int
    num_tokens: int

    @property
    def block_id(self) -> int:
        return self.run.ids[self.inside - self.run.count]  # from the end: the first ones may be gone

    @property
    def is_leaf(self) -> bool:
        """Whether no other block follows it in the tree, and no table's path ends with it."""
        return self.inside == self.run.count - 1 and not self.run.children and not self.run.anchors


Eligible = Callable[[Source], bool]


class Match(NamedTuple):
    """How far a token path leads: `num_blocks` whole blocks, the last `inside` of them in `run`."""

    run: Run
    inside: int
    num_blocks: int
    source: Source | None


class Tree:
    """All runs of one window."""

    __slots__ = ("roots", "tokens_per_block")

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.roots: dict[ScopeKey, Root] = {}

    def root(self, scope: Scope, width: int) -> Root:
        """The root of a scope, made when it is new."""
        key = (scope.lora, scope.salt, width)
        root = self.roots.get(key)
        if root is None:
            root = self.roots[key] = Root(Scope(scope.lora, scope.salt) if scope.extras else scope, key)
        return root

    def match(self, root: Run, log: TokenLog, num_tokens: int, eligible: Eligible | None) -> Match:
        """The longest cached path of the first `num_tokens` tokens.

        `eligible` says which blocks may serve in part; None: none.
        """
        told, items, size = log.told, log.items, log.block_bytes
        stop = num_tokens // self.tokens_per_block
        run, at = root, 0
        while at < stop:
            key = told[at * size : (at + 1) * size]
            if items and at in items:
                key += items[at]
            child = run.children.get(key)
            if child is None:
                break
            common = common_blocks(child, told, at, min(stop, next_item(items, at)))
            run = child
            at += common
            if common < child.count:
                break
        inside = at - run.start
        source = self._source(run, inside, log, at, num_tokens, eligible) if eligible else None
        return Match(run, inside, at, source)

    def _source(
        self, run: Run, inside: int, log: TokenLog, at: int, num_tokens: int, eligible: Eligible
    ) -> Source | None:
        """The block that holds most of the tokens behind a match."""
        size = self.tokens_per_block
        block = log.content(at * size, min((at + 1) * size, num_tokens))
        if not block:
            return None
        items = log.items.get(at, b"")
        if inside < run.count:
            if inside < run.num_gone:
                return None
            num_common = common_tokens(block, items, run.block(inside), b"", log.width)
            found = Source(run, inside, num_common)
            return found if num_common and eligible(found) else None
        if not run.children:
            return None
        return self._best_child(run, block, items, log.width, eligible)

    def _best_child(self, run: Run, block: bytes, items: bytes, width: int, eligible: Eligible) -> Source | None:
        """The best of the children that share the most tokens, at most `SIBLING_REACH` on each side of the block."""
        best: Source | None = None
        order, at = run.neighbours(block)
        for near in (
            range(at, min(len(order), at + SIBLING_REACH)),
            range(at - 1, max(-1, at - 1 - SIBLING_REACH), -1),
        ):
            for place in near:
                child = run.children[order[place]]
                num_common = common_tokens(block, items, order[place], child.items, width)
                if not (num_common or items or child.items):
                    break
                found = Source(child, 0, num_common)
                if (
                    num_common
                    and not child.num_gone
                    and (best is None or _rank(found) > _rank(best))
                    and eligible(found)
                ):
                    best = found
        return best

    def runs(self) -> Iterator[Run]:
        """All runs, parents before their children, without the roots."""
        for root in list(self.roots.values()):
            waiting = list(root.children.values())
            while waiting:
                run = waiting.pop()
                yield run
                waiting.extend(run.children.values())


def common_blocks(run: Run, told: bytes, at: int, stop: int) -> int:
    """How many blocks of the run equal those of some tokens from ordinal `at` on, before `stop`.

    The first one is known to be equal.
    """
    high, size = min(run.count, stop - at), run.block_bytes
    if high <= 1:
        return high
    ours = memoryview(run.tokens)[run.base : run.base + high * size]
    if told.startswith(ours, at * size):  # the fastest comparison of parts: nothing is copied
        return high
    low, high = 1, high - 1  # the first `low` are equal, not more than `high` are
    while low < high:
        middle = (low + high + 1) // 2
        if told.startswith(ours[low * size : middle * size], (at + low) * size):
            low = middle
        else:
            high = middle - 1
    return low


def next_item(items: dict[int, bytes], at: int) -> int:
    """The ordinal behind `at` up to which a run may reach: an item starts there, or one started in block `at`."""
    if not items:
        return 1 << 62
    return at + 1 if at in items else min((ordinal for ordinal in items if ordinal > at), default=1 << 62)


def common_tokens(block: bytes, items: bytes, other: bytes, other_items: bytes, width: int) -> int:
    """Leading tokens of two blocks that are equal and not behind an item in which they differ (core spec D53)."""
    if block[:width] != other[:width]:
        return 0
    size = min(len(block), len(other))
    differing = int.from_bytes(block[:size], "big") ^ int.from_bytes(other[:size], "big")
    common = (size - (differing.bit_length() + 7) // 8) // width
    if items != other_items:
        common = min(common, *(first_item_offset(found) for found in (items, other_items) if found))
    return common


def _rank(source: Source) -> tuple[int, int, int, int]:
    """Most tokens, then the fastest tier, then the latest used, then the lowest id (core spec D41)."""
    return source.num_tokens, -source.run.tier, source.run.used, -source.block_id
