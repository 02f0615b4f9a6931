"""A run: consecutive blocks of one chain that share one fate.

In:  -
Out: `Run`, a node of the reuse tree (or a stretch of empty blocks outside of it), and how to cut one in two.
Law: all blocks of a run have the same holders, priority, duration, expiry and tier, and neighbouring places in the
     order of victims. Cutting changes nothing that can be observed; the lower part stays the object that it was.

    tokens   |block 0|block 1|block 2|     width * tokens_per_block bytes each
    ids      |   17  |   4   |   9   |     empty in a hole: the way to descendants, without blocks
    stamp    |  s+2  |  s+1  |   s   |     the last block is the first victim
"""

from array import array
from bisect import bisect_left, insort
from typing import Final

from kv_core.keys import BlockKey
from kv_core.retention import DEFAULT_PRIORITY

NO_IDS: Final = array("i")


class Run:
    """See the module. `stamp` None: not among the free. `kin` counts children on the same tier.

    A free run that requests about to be admitted want (`wants` of them) is out of the victims' way; `reserved` is then
    its stamp.
    """

    __slots__ = (
        "anchors",
        "block_bytes",
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
        "tier",
        "tokens",
        "used",
        "wants",
    )

    def __init__(
        self, parent: "Run | None", start: int, tokens: bytes, ids: "array[int]", block_bytes: int = 0
    ) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.ids = ids
        self.count = len(ids)
        self.block_bytes = block_bytes
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
    def stop(self) -> int:
        """The ordinal behind the last block."""
        return self.start + self.count

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
        if self.items or self.is_partial:
            return self.tokens + self.items
        return self.tokens[: self.block_bytes]

    def block(self, inside: int) -> bytes:
        """The tokens of one block."""
        return self.tokens[inside * self.block_bytes : (inside + 1) * self.block_bytes]

    def exact_tokens(self) -> bytes:
        """The tokens of all blocks; those of blocks that were given up are dropped now."""
        if len(self.tokens) > self.count * self.block_bytes:
            self.tokens = self.tokens[: self.count * self.block_bytes]
        return self.tokens

    def shorten(self, count: int) -> None:
        """The last `count` blocks, but not all, are given up. Tokens are dropped when they are half of what is kept."""
        del self.ids[-count:]
        self.count -= count
        if self.keys is not None:
            del self.keys[-count:]
        if len(self.tokens) > 2 * self.count * self.block_bytes:
            self.exact_tokens()

    def cut(self, count: int) -> "Run":
        """Give the first `count` blocks to a new run above; self keeps the rest. Returns the new run.

        A caller that keeps victims in order must enter the new run there if it has a stamp.
        """
        parent, block_bytes = self.parent, self.block_bytes
        assert parent is not None, "law: what is cut is in the tree"
        tokens = self.exact_tokens()
        upper = Run(parent, self.start, tokens[: count * block_bytes], self.ids[:count], block_bytes)
        upper.count = count
        parent.replace(upper.key(), upper)
        upper.priority, upper.duration_ms, upper.expires_at = self.priority, self.duration_ms, self.expires_at
        upper.rank, upper.holders, upper.tier = self.rank, self.holders, self.tier
        upper.used, upper.hot = self.used, self.hot
        if self.keys is not None:
            upper.keys, self.keys = self.keys[:count], self.keys[count:]
        self.tokens = tokens[count * block_bytes :]
        self.ids = self.ids[count:]
        self.start += count
        self.count -= count
        self.parent = upper
        if self.stamp is not None:
            upper.stamp = self.stamp + self.count
        if self.wants:
            upper.wants = self.wants
            upper.reserved = None if self.reserved is None else self.reserved + self.count
        upper.adopt(self, self.key())
        return upper
