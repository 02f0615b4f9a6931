"""A run: consecutive blocks of one chain that share one fate.

In:  -
Out: `Run`, a node of the reuse tree (or a stretch of empty blocks outside of it); how to cut one and to join two.
Law: all blocks of a run have the same holders, priority, duration, expiry and tier, and neighbouring places in the
     order of victims. Cutting and joining change nothing that can be observed; the lower part stays the object.

    tokens   |block 0|block 1|block 2|     `block_bytes` each, from byte `base` of some on
    ids      |   17  |   4   |   9   |
    stamp    |  s+2  |  s+1  |   s   |     the last block is the first victim

    in a sliding window, where nothing depends on the blocks before, the first block is the first victim:

    tokens   |block 0|block 1|block 2|     the way to descendants
    ids      |  gone |   4   |   9   |     none at all in a hole
    stamp    |       |   s   |  s+1  |
    spare    before this ordinal they go before other runs of their priority
"""

from array import array
from bisect import bisect_left, insort
from typing import Final

from kv_core.keys import BlockKey
from kv_core.retention import DEFAULT_PRIORITY

NO_CHILDREN: Final[dict[bytes, "Run"]] = {}
"""Of all runs that have none; never changed. Why shared: a dictionary a run is one more object to collect."""
_SLACK: Final = 3
"""A run may keep bytes alive of which it uses two of three; what is less is copied."""


class Run:
    """See the module. `stop` is the ordinal behind the last block; `kin` counts children on the same tier.

    `count` includes the `num_gone` first blocks, which are not there any more; `rank` is that of the first victim.
    `stamp` None: not among the free. A free run that requests about to be admitted want (`wants` of them) is out of
    the victims' way; `reserved` is then its stamp.
    """

    __slots__ = (
        "anchors",
        "base",
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
        "spare",
        "stamp",
        "start",
        "stop",
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
        self.stop = start + self.count
        self.base = 0
        self.block_bytes = block_bytes
        self.items = b""
        self.is_partial = False
        self.keys: list[BlockKey] | None = None
        self.children = NO_CHILDREN
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
        self.spare = 0
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

    @property
    def num_gone(self) -> int:
        """First blocks that are not there any more."""
        return self.count - len(self.ids)

    @property
    def first(self) -> int:
        """The ordinal of the first block that is there."""
        return self.stop - len(self.ids)

    @property
    def num_alike(self) -> int:
        """How many of the blocks go before the next run does."""
        return self.spare - self.first if self.first < self.spare < self.stop else len(self.ids)

    @property
    def live_keys(self) -> list[BlockKey]:
        """The keys of the blocks that are there; none if nobody listens."""
        return [] if self.keys is None else self.keys[self.num_gone :]

    def adopt(self, child: "Run", key: bytes) -> None:
        """Link a child under the bytes of its first block."""
        if self.children:
            self.children[key] = child
        else:
            self.children = {key: child}
        if self.order is not None:
            insort(self.order, key)
        if child.tier == self.tier:
            self.kin += 1

    def disown(self, child: "Run", key: bytes) -> None:
        """Unlink a child."""
        if len(self.children) > 1:
            del self.children[key]
        else:
            self.children = NO_CHILDREN
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
            return self.tokens
        first = self.tokens[self.base : self.base + self.block_bytes]
        return first + self.items if self.items else first

    def block(self, inside: int) -> bytes:
        """The tokens of one block."""
        if self.is_partial:
            return self.tokens
        first = self.base + inside * self.block_bytes
        return self.tokens[first : first + self.block_bytes]

    def content(self) -> bytes:
        """The tokens of all blocks."""
        return self.tokens if self.is_partial else self.tokens[self.base : self.base + self.count * self.block_bytes]

    def forget(self, count: int) -> None:
        """The first `count` blocks, but not all, are given up; their place stays."""
        del self.ids[:count]
        if self.first >= self.spare:
            self.rank |= 1

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
        if len(self.tokens) * 2 > self.count * self.block_bytes * _SLACK:
            self.tokens = self.content()
            self.base = 0

    def continues(self, upper: "Run") -> bool:
        """Whether nothing tells the blocks of two runs of one table, this one below `upper`, apart any more."""
        return (
            self.holders == upper.holders == 1
            and len(upper.children) == 1
            and not (upper.anchors or upper.items or self.items)
            and self._fate() == upper._fate()
        )

    def _fate(self) -> tuple[int | bool | None, ...]:
        return self.priority, self.duration_ms, self.used, self.hot

    def join(self, upper: "Run") -> None:
        """Take the blocks of the run above, which this one continues: what `cut` does, undone."""
        parent = upper.parent
        assert parent is not None, "law: what is joined is in the tree"
        parent.replace(upper.key(), self)
        self.tokens = upper.content() + self.content()
        self.base = 0
        self.ids = upper.ids + self.ids
        if self.keys is not None and upper.keys is not None:
            self.keys = upper.keys + self.keys
        self.start = upper.start
        self.count += upper.count
        self.parent = parent
        upper.parent = None

    def cut(self, count: int, *, front_first: bool) -> "Run":
        """Give the first `count` blocks to a new run above; self keeps the rest. Returns the new run.

        A caller that keeps victims in order must enter a run there whose stamp is new: with `front_first`, where the
        first block is the first victim, that is self too.
        """
        parent = self.parent
        assert parent is not None, "law: what is cut is in the tree"
        num_upper = max(0, count - self.num_gone)
        upper = Run(parent, self.start, self.tokens, self.ids[:num_upper], self.block_bytes)
        upper.base = self.base
        upper.count = count
        upper.stop = self.start + count
        parent.replace(self.key(), upper)
        upper.used, upper.hot, upper.tier = self.used, self.hot, self.tier
        if num_upper:
            upper.priority, upper.duration_ms, upper.expires_at = self.priority, self.duration_ms, self.expires_at
            upper.rank, upper.spare, upper.holders = self.rank, self.spare, self.holders
        if self.keys is not None:
            upper.keys, self.keys = self.keys[:count], self.keys[count:]
        self.base += count * self.block_bytes
        self.ids = self.ids[num_upper:]
        self.start += count
        self.count -= count
        smaller = upper if count < self.count else self
        smaller.tokens, smaller.base = smaller.content(), 0
        upper.settle()
        self.settle()
        self.parent = upper
        if num_upper:
            upper.wants = self.wants
            upper.stamp, self.stamp = self._cut_stamp(self.stamp, num_upper, front_first)
            upper.reserved, self.reserved = self._cut_stamp(self.reserved, num_upper, front_first)
            if self.first >= self.spare:
                self.rank |= 1
        upper.adopt(self, self.key())
        if not num_upper and upper.tier:
            upper.move(0)
        return upper

    def _cut_stamp(self, stamp: int | None, num_upper: int, front_first: bool) -> tuple[int | None, int | None]:
        """The stamps of the upper part and of what is left."""
        if stamp is None:
            return None, None
        return (stamp, stamp + num_upper) if front_first else (stamp + self.count, stamp)


def path(tail: Run, start: int) -> list[Run]:
    """The runs of a path from ordinal `start` (a border of runs) on, in order."""
    runs: list[Run] = []
    run = tail
    while run.stop > start:
        runs.append(run)
        assert run.parent is not None, "law: the path begins at a root"
        run = run.parent
    runs.reverse()
    return runs


def heal(tail: Run, start: int) -> None:
    """Join what of a table's path became alike: holes that were filled again leave it in pieces."""
    run = tail
    while run.start > start:
        upper = run.parent
        assert upper is not None, "law: the path begins at a root"
        if run.continues(upper):
            run.join(upper)
        else:
            run = upper
