"""A run: consecutive blocks of one chain that share one fate.

In:  -
Out: `Run`, a node of the reuse tree (or a stretch of empty blocks outside of it), and how to cut one in two.
Law: all blocks of a run have the same holders, priority, duration, expiry and tier, and neighbouring places in the
     order of victims. Cutting changes nothing that can be observed; the lower part stays the object that it was.

    tokens   |block 0|block 1|block 2|     `block_words` words each, from word `base` of an array on
    ids      |   17  |   4   |   9   |     empty in a hole: the way to descendants, without blocks
    stamp    |  s+2  |  s+1  |   s   |     the last block is the first victim
"""

from array import array
from bisect import bisect_left, insort
from typing import Final

from kv_core.keys import BlockKey
from kv_core.retention import DEFAULT_PRIORITY
from kv_core.token_log import little

NO_WORDS: Final = array("I")
_SLACK: Final = 3
"""A run may keep an array alive of which it uses two of three words; what is less is copied."""


class Run:
    """See the module. `stop` is the ordinal behind the last block; `kin` counts children on the same tier.

    `stamp` None: not among the free. A free run that requests about to be admitted want (`wants` of them) is out of
    the victims' way; `reserved` is then its stamp.
    """

    __slots__ = (
        "anchors",
        "base",
        "block_words",
        "children",
        "count",
        "duration_ms",
        "expires_at",
        "holders",
        "hot",
        "ids",
        "is_partial",
        "items",
        "keys",
        "kin",
        "order",
        "parent",
        "parked",
        "priority",
        "rank",
        "reserved",
        "stamp",
        "start",
        "stop",
        "tier",
        "tokens",
        "used",
        "wants",
    )

    def __init__(
        self, parent: "Run | None", start: int, tokens: "array[int]", ids: "array[int]", block_words: int = 0
    ) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.ids = ids
        self.count = len(ids)
        self.stop = start + self.count
        self.base = 0
        self.block_words = block_words
        self.items = b""
        self.is_partial = False
        self.keys: list[BlockKey] | None = None
        self.children: dict[bytes, Run] = {}
        self.order: list[bytes] | None = None
        self.kin = 0
        self.holders = 0
        self.anchors = 0
        self.priority = DEFAULT_PRIORITY
        self.duration_ms: int | None = None
        self.expires_at: int | None = None
        self.rank = DEFAULT_PRIORITY
        self.stamp: int | None = None
        self.parked = False
        self.wants = 0
        self.reserved: int | None = None
        self.tier = 0
        self.used = 0
        self.hot = False

    @property
    def is_needed(self) -> bool:
        """Whether somebody holds the run or is about to."""
        return self.holders > 0 or self.wants > 0

    @property
    def is_hole(self) -> bool:
        return not self.ids

    def adopt(self, child: "Run", key: bytes) -> None:
        """Link a child under the bytes of its first block."""
        self.children[key] = child
        if self.order is not None:
            insort(self.order, key)
        if child.tier == self.tier:
            self.kin += 1

    def disown(self, child: "Run", key: bytes) -> None:
        """Unlink a child."""
        del self.children[key]
        if self.order is not None:
            del self.order[bisect_left(self.order, key)]
        if child.tier == self.tier:
            self.kin -= 1

    def replace(self, key: bytes, child: "Run") -> None:
        """Another run, of the same tier, begins with the same block."""
        self.children[key] = child

    def neighbours(self, block: bytes) -> tuple[list[bytes], int]:
        """The keys of all children in the order of bytes, and where `block` belongs among them.

        Common prefixes with `block` are longest there and only get shorter on either side.
        """
        if self.order is None:
            self.order = sorted(self.children)
        return self.order, bisect_left(self.order, block)

    def move(self, tier: int) -> None:
        """All blocks are on another tier now."""
        parent = self.parent
        if parent is not None:
            parent.kin += (tier == parent.tier) - (self.tier == parent.tier)
        self.tier = tier
        self.kin = sum(child.tier == tier for child in self.children.values())

    def key(self) -> bytes:
        """The bytes under which the parent knows the run."""
        if self.is_partial:
            return self.tokens.tobytes()
        first = self.tokens[self.base : self.base + self.block_words].tobytes()
        return first + self.items if self.items else first

    def block(self, inside: int) -> bytes:
        """The tokens of one block."""
        if self.is_partial:
            return self.tokens.tobytes()
        first = self.base + inside * self.block_words
        return self.tokens[first : first + self.block_words].tobytes()

    def words(self, count: int) -> "array[int]":
        """The tokens of the first `count` blocks."""
        return self.tokens[self.base : self.base + count * self.block_words]

    def content(self) -> bytes:
        """All tokens as bytes, little-endian."""
        return little(self.tokens if self.is_partial else self.words(self.count))

    def shorten(self, count: int) -> None:
        """The last `count` blocks, but not all, are given up."""
        del self.ids[-count:]
        self.count -= count
        self.stop -= count
        if self.keys is not None:
            del self.keys[-count:]
        self.settle()

    def settle(self) -> None:
        """Copy the tokens if they are a small part of what they keep alive."""
        num_words = self.count * self.block_words
        if len(self.tokens) * 2 > num_words * _SLACK:
            self.tokens = self.words(self.count)
            self.base = 0

    def cut(self, count: int) -> "Run":
        """Give the first `count` blocks to a new run above; self keeps the rest. Returns the new run.

        A caller that keeps victims in order must enter the new run there if it has a stamp.
        """
        parent = self.parent
        assert parent is not None, "law: what is cut is in the tree"
        upper = Run(parent, self.start, self.tokens, self.ids[:count], self.block_words)
        upper.base = self.base
        upper.count = count
        upper.stop = self.start + count
        parent.replace(self.key(), upper)
        upper.priority, upper.duration_ms, upper.expires_at = self.priority, self.duration_ms, self.expires_at
        upper.rank, upper.holders, upper.tier = self.rank, self.holders, self.tier
        upper.used, upper.hot = self.used, self.hot
        if self.keys is not None:
            upper.keys, self.keys = self.keys[:count], self.keys[count:]
        self.base += count * self.block_words
        self.ids = self.ids[count:]
        self.start += count
        self.count -= count
        smaller = upper if count < self.count else self
        smaller.tokens, smaller.base = smaller.words(smaller.count), 0
        upper.settle()
        self.settle()
        self.parent = upper
        if self.stamp is not None:
            upper.stamp = self.stamp + self.count
        if self.wants:
            upper.wants = self.wants
            upper.reserved = None if self.reserved is None else self.reserved + self.count
        upper.adopt(self, self.key())
        return upper
