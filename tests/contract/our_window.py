"""One window of our manager as lists and dicts: the seed's lists, our choices.

In:  what `our_model` decides.
Out: blocks taken, held, moved and given up; matches.
Law: see `our_model`. Blocks are the nodes of the tree; a hole is a node without a block, in a sliding window.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

from contract.seed_model import DEFAULT_PRIORITY, Block, Key, NoFreeBlock, SeedWindow

Part = TypeVar("Part")
Wish = tuple[int | None, int | None]
Note = tuple[Any, int | None]
"""What became of the block of this name: removed (None), or moved to this level."""
Room = tuple[Block, list[Note]]
"""A block to give out, and what happened to make it free."""
HOLE = -2
ASIDE = 99
"""Level of what holds a place in a queue."""


class OurWindow(SeedWindow):
    """One window: the seed's lists, our choices."""

    causes: set[str]
    depended_on: set[int]

    def victim(self, level: int) -> Block:
        """The lowest priority, then the first, among blocks on whose place nothing of the level depends (D37)."""
        found = [block for block in self.queue if block.level == level]
        if not found:
            raise NoFreeBlock
        free = [block for block in found if self.is_sliding or not self.kin(block)]
        chosen = min(free, key=lambda block: (block.rank, self.is_sliding and block.in_tree and not block.spare))
        if chosen is not min(found, key=lambda block: block.rank):
            self.causes.add("core-D32" if self.is_sliding else "core-D37")
        return chosen

    def by_turn(self, parts: list[Part]) -> list[Part]:
        """Blocks of a table as they are given up: the last first, in a sliding window the first."""
        if self.is_sliding and len(parts) > 1:
            self.causes.add("core-D32")
        return parts if self.is_sliding else parts[::-1]

    def kin(self, block: Block) -> bool:
        return any(child.level == block.level for child in block.children.values())

    def hold(self, block: Block, wish: Wish = (None, None)) -> None:
        """One more holder; a wish replaces what nobody else holds to, else the stronger one stays (D38)."""
        if block in self.queue:
            self.queue.remove(block)
        block.expires = None
        block.spare = False
        block.refs += 1
        if wish[0] is not None:
            others = block.refs > 1
            strongest = max(wish, (block.priority, block.duration), key=strength) if others else wish
            if others and strongest != wish:
                self.causes.add("core-D38")
            if strongest[0] != block.priority and block.in_tree and strongest[0] is not None:
                self.log.priority(self.window, block.name, block.priority, strongest[0])
            block.priority, block.duration = strongest[0] or 0, strongest[1]

    def let_go(self, block: Block, to_front: bool = False, spare: bool = False) -> None:
        block.refs -= 1
        if not block.refs:
            block.spare = spare
            self.release(block, to_front)

    def discard(self, block: Block) -> None:
        """A copy of what the tree has elsewhere goes before all others (D30)."""
        self.causes.add("core-D30")
        block.refs, block.priority, block.duration, block.key = 0, 0, None, None
        self.release(block, to_front=True)

    def raise_up(self, lower: Block, own: Block) -> None:
        """The tree takes over a request's block in place of one on a lower level (D30)."""
        own.key, own.full, own.name, own.prev, own.children = (
            lower.key,
            lower.full,
            lower.name,
            lower.prev,
            lower.children,
        )
        own.priority, own.duration = lower.priority, lower.duration
        for child in own.children.values():
            child.prev = own
        assert own.prev is not None
        assert own.key is not None
        own.prev.children[own.key] = own
        lower.prev, lower.children = None, {}
        self.queue.remove(lower)
        lower.expires = None
        self.discard(lower)
        self.log.level(self.window, own.name, 1, 0)

    # Taking blocks.

    def take_many(self, wishes: list[Wish]) -> list[Block]:
        """Victims for a whole request at once (D63)."""
        taken = self.tell(self.make_room(0, len(wishes), 0))
        for block, (priority, duration) in zip(taken, wishes, strict=True):
            block.priority = DEFAULT_PRIORITY if priority is None else priority
            block.duration, block.expires, block.refs, block.key, block.full = duration, None, 1, None, False
            block.owner = 0
        self.counts["alloc_total_blocks"] += len(taken)
        return taken

    def tell(self, room: list[Room]) -> list[Block]:
        """Events of what became free, victim by victim."""
        for _, notes in room:
            for name, level in notes:
                if level is None:
                    self.log.removed(self.window, name)
                else:
                    self.log.level(self.window, name, level - 1, level)
        return [block for block, _ in room]

    def make_room(self, level: int, count: int, count_later: int) -> list[Room]:
        """Free blocks of a level; what can move down and stay there moves, the rest is dropped."""
        chosen = []
        for _ in range(count):
            block = self.victim(level)
            self.queue.remove(block)
            chosen.append(block)
            self.counts["alloc_new_blocks"] += level == 0 and not block.in_tree
            if level == 0 and not block.in_tree and block.owner is not None:
                # It holds nothing any more: counted as new, and not worth a move.
                self.causes.update({"core-D37 counts", *(["core-D37"] if self.num_lower else [])})
            block.level += 10  # on the way: nothing counts it
        movable: list[Block] = []
        for block in chosen:
            movable += [block] if self.can_move(block, level, chosen, movable) else []
        left = max(0, self.num_free(level + 1) - count_later) if movable else 0
        moving = movable[len(movable) - min(left, len(movable)) :]
        if len(moving) < len(movable) or len(moving) > 1:
            self.causes.add("core-D63")
        room: list[Room] = []
        for block in chosen:
            if block not in moving:
                block.level, block.duration, block.expires = level, None, None
                room.append((block, self.drop_content(block)))
        places = dict(room)
        below = self.make_room(level + 1, len(moving), 0) if moving else []
        carried = dict(zip(moving, below, strict=True))
        return [
            self.move_down(block, level, *carried[block]) if block in carried else (block, places[block])
            for block in chosen
        ]

    def can_move(self, block: Block, level: int, chosen: list[Block], moving: list[Block]) -> bool:
        """It is wanted, or what stays below, or moves there before it, depends on it."""
        if not block.in_tree or level > 0 or not self.num_lower or not self.config["onboard_blocks"]:
            return False
        stays = any(child not in chosen or child in moving for child in block.children.values())
        return block.priority >= self.threshold or (stays and not self.is_sliding)

    @property
    def num_lower(self) -> int:
        return int(self.config["blocks_per_window"][str(self.window)][1])

    def move_down(self, block: Block, level: int, lower: Block, notes: list[Note]) -> Room:
        """The block takes the place of a lower one, which is given out instead."""
        block.level, lower.level = level + 1, level
        if block.duration is not None:
            self.causes.add("core-D38")
        self.queue.append(block)
        block.rank = block.priority
        return lower, [(block.name, level + 1), *notes]

    def drop_content(self, block: Block) -> list[Note]:
        """The block leaves the tree; what depends on it goes too, or a hole stays."""
        if not block.in_tree:
            return []
        notes: list[Note] = []
        if self.is_sliding and block.children:
            self.leave_hole(block)
        else:
            for child in list(block.children.values()):
                notes += self.drop_below(child)
            self.prune(block)
        return [*notes, (block.name, None)]

    def drop_below(self, block: Block) -> list[Note]:
        notes: list[Note] = []
        for child in list(block.children.values()):
            notes += self.drop_below(child)
        self.unlink(block)
        self.queue.remove(block)
        block.priority = block.rank = 0
        block.duration = block.expires = None
        self.queue.insert(0, block)
        return [*notes, (block.name, None)]

    def leave_hole(self, block: Block) -> None:
        assert block.prev is not None
        assert block.key is not None
        hole = Block(HOLE, -1, block.key, True, block.prev, block.children, name=block.name)
        for child in hole.children.values():
            child.prev = hole
        block.children = {}
        block.prev.children[block.key] = hole
        block.prev = None

    def prune(self, block: Block) -> None:
        """Unlink, and holes that only led to it."""
        parent = block.prev
        self.unlink(block)
        while parent is not None and parent.block_id == HOLE and not parent.children:
            gone, parent = parent, parent.prev
            self.unlink(gone)

    def bring(self, blocks: list[Block], num_wanted: int) -> None:
        """Onboard blocks that are held already (D36); the places they leave go first on their level."""
        if not blocks:
            return
        self.causes.update(("core-D36", "core-D55"))
        fresh = self.counts["alloc_new_blocks"]
        carriers = self.tell(self.make_room(0, len(blocks), max(0, num_wanted - len(blocks))))
        self.counts["alloc_new_blocks"] = fresh
        for block, carrier in zip(blocks, carriers, strict=True):
            block.level, carrier.level = 0, 1
            if block.in_tree:
                self.log.level(self.window, block.name, 1, 0)
        for carrier in reversed(carriers):
            carrier.priority = carrier.rank = 0
            carrier.duration, carrier.key = None, None
            self.queue.insert(0, carrier)

    # Matching.

    def walk(self, keys: list[Key], limit: int) -> list[Block]:
        """Whole blocks of the first `limit` tokens, holes included."""
        nodes, cursor = [], self.root
        for at, key in enumerate(keys):
            if (at + 1) * self.size > limit or key not in cursor.children:
                break
            cursor = cursor.children[key]
            nodes.append(cursor)
        return nodes

    def source(self, parent: Block, key: Key, is_shared: bool) -> tuple[int, Block | None]:
        """The child that holds most of `key`'s tokens, and how many (D34, D40, D41, D53)."""
        config = self.config
        if not config["enable_partial_reuse"] or not (config["copy_on_partial_reuse"] or is_shared):
            if key in parent.children:
                self.causes.add("core-D40")
            return 0, None
        eligible = [
            block
            for block in parent.children.values()
            if config["copy_on_partial_reuse"] or (not block.refs and id(block) not in self.depended_on)
        ]
        if key in parent.children and parent.children[key] not in eligible:
            self.causes.add("core-D40")
        return self.best(eligible, key)

    def best(self, blocks: Iterable[Block], key: Key) -> tuple[int, Block | None]:
        """The block that shares most tokens, and how many (D41, D53)."""
        best: tuple[tuple[int, int, int, int], Block | None] = ((0, 0, 0, 0), None)
        for block in blocks:
            if block.block_id != HOLE:
                assert block.key is not None
                count = common(block.key, key)
                if count != block.key.partial_match(key):
                    self.causes.add("core-D53")
                if count and count == best[0][0]:
                    self.causes.add("core-D41")
                rank = (count, -block.level, block.used, -block.block_id)
                best = (rank, block) if count and rank > best[0] else best
        return best[0][0], best[1]


def common(one: Key | None, two: Key | None) -> int:
    """Leading tokens with equal cache: behind an item in which they differ nothing is (D53)."""
    if one is None or two is None or (one.uses_extra, one.lora, one.salt) != (two.uses_extra, two.lora, two.salt):
        return 0
    count = 0
    for mine, theirs in zip(one.tokens, two.tokens, strict=False):
        if mine != theirs:
            break
        count += 1
    if one.items != two.items:
        starts = [
            item[2] for key in (one, two) for item in key.items if item not in (one.items if key is two else two.items)
        ]
        count = min([count, *starts])
    return count


def strongest_wishes(retention: dict[str, Any], size: int, length: int) -> list[Wish]:
    """The strongest wish among the ranges that overlap a block (D45)."""
    wishes: list[Wish] = []
    for first in range(0, length, size):
        last = min(first + size, length)
        found: Iterable[Wish] = (
            (one.get("priority", 35), one.get("duration_ms"))
            for one in retention.get("ranges", [])
            if one["start"] < last and (one.get("end") is None or first < one["end"])
        )
        wishes.append(max(found, key=strength, default=(None, None)))
    return wishes


def held(block: Block | None) -> Block:
    assert block is not None, "it is at the end of its sequence"
    return block


def strength(wish: Wish) -> tuple[int, float]:
    return (-1 if wish[0] is None else wish[0]), (float("inf") if wish[1] is None else wish[1])


def or_default(wish: Wish) -> tuple[int, int | None]:
    return (DEFAULT_PRIORITY if wish[0] is None else wish[0]), wish[1]
