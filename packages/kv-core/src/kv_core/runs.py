"""A run: consecutive blocks of one chain that share one fate.

In:  -
Out: `Run`, a node of the reuse tree (or a stretch of empty blocks outside of it); how to cut one and to join two.
Law: all blocks of a run have the same holders, priority, duration, expiry and tier, and neighbouring places in the
     order of victims. Cutting and joining change nothing that can be observed; the lower part stays the object.

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

    def __lt__(self, other: "Run") -> bool:
        """Heaps compare runs where stamps are equal: at most one of such entries still counts, whichever is first."""
        return False

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

    def continues(self, upper: "Run") -> bool:
        """Whether nothing tells the blocks of two free runs, this one below `upper`, apart any more."""
        return (
            self.stamp is not None
            and upper.stamp == self.stamp + self.count
            and len(upper.children) == 1
            and upper.parent is not None
            and not (upper.anchors or upper.parked or upper.wants or self.wants)
            and not (upper.items or self.items or self.is_partial)
            and self._fate() == upper._fate()
        )

    def _fate(self) -> tuple[int | bool | None, ...]:
        kept = self.rank, self.priority, self.duration_ms, self.expires_at
        return *kept, self.tier, self.used, self.hot, self.keys is None

    def join(self, upper: "Run") -> None:
        """Take the blocks of the run above, which this one continues: what `cut` does, undone."""
        parent = upper.parent
        assert parent is not None, "law: what is joined is in the tree"
        parent.replace(upper.key(), self)
        self.tokens = upper.words(upper.count) + self.words(self.count)
        self.base = 0
        self.ids = upper.ids + self.ids
        if self.keys is not None and upper.keys is not None:
            self.keys = upper.keys + self.keys
        self.start = upper.start
        self.count += upper.count
        self.parent = parent
        upper.parent = upper.stamp = upper.expires_at = None

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


def heal(tail: Run, start: int) -> None:
    """Join what of a path became free together: holes that were filled again leave it in pieces."""
    run = tail
    while run.stop > start and run.parent is not None:
        upper = run.parent
        if run.continues(upper):
            run.join(upper)
        else:
            run = upper
