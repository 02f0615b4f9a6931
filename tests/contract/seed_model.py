"""The seed's block manager as lists and dicts, for rules that need to know what the seed would do (core spec 3 to 8).

In:  the operations of a scenario, already split by window.
Out: block ids, free counts, matches, events of the seed, defects included.
Law: obviously as the specification says, not fast. It judges nothing by itself: a deviation needs its answer to be what
     the case expects, so a mistake in here can only make a case fail.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

DEFAULT_PRIORITY = 35


class NoFreeBlock(Exception):
    """The seed raises: no free blocks left, or another of its checks."""


class TooMuchFound(NoFreeBlock):
    """The seed raises: matched tokens and those of a connector leave nothing of the prompt (core spec 1.7)."""


class Key(NamedTuple):
    """A block key (core spec 1.3)."""

    uses_extra: bool
    lora: int | None
    salt: int | None
    items: tuple[tuple[Any, ...], ...]
    tokens: tuple[tuple[int, int], ...]

    def partial_match(self, other: "Key") -> int:
        if (self.lora, self.salt, self.items) != (other.lora, other.salt, other.items):
            return 0
        count = 0
        for one, two in zip(self.tokens, other.tokens, strict=False):
            if one != two:
                break
            count += 1
        return count


@dataclass(eq=False, slots=True)
class Block:
    """A block record (core spec 1.9)."""

    block_id: int
    level: int
    key: Key | None = None
    full: bool = False
    prev: "Block | None" = None
    children: "dict[Key, Block]" = field(default_factory=dict)
    refs: int = 0
    scheduling_refs: int = 0
    priority: int = DEFAULT_PRIORITY
    rank: int = DEFAULT_PRIORITY
    duration: int | None = None
    expires: int | None = None
    name: Any = None
    owner: int | None = None
    used: int = 0
    spare: bool = False

    @property
    def in_tree(self) -> bool:
        return self.has_tokens and self.prev is not None

    @property
    def has_tokens(self) -> bool:
        return self.key is not None and len(self.key.tokens) > 0


@dataclass(eq=False, slots=True)
class Held:
    """What one sequence has in one window."""

    beams: list[list[int]]
    allocated: list[Block] = field(default_factory=list)


class SeedWindow:
    """One window manager."""

    def __init__(self, config: dict[str, Any], window: int, counts: Sequence[int], clock: "Clock", log: "Log") -> None:
        self.config = config
        self.window = window
        self.size: int = config["tokens_per_block"]
        self.is_sliding = window < config["max_sequence_length"]
        self.clock = clock
        self.log = log
        levels = [0] * counts[0] + [1] * counts[1]
        self.blocks = [Block(number, level) for number, level in enumerate(levels)]
        self.root = Block(-1, 0)
        self.queue = list(self.blocks)
        self.held: dict[int, Held] = {}
        self.valid: dict[int, bool] = {}
        self.scheduling_free = 0
        self.counts = dict.fromkeys(("alloc_total_blocks", "alloc_new_blocks", "reused_blocks", "missed_blocks"), 0)
        threshold = config.get("secondary_offload_min_priority")
        self.threshold = 30 if threshold is None else threshold
        log.add(window, "created", list(counts))

    # Queues (5).

    def num_free(self, level: int = 0) -> int:
        return sum(block.level == level for block in self.queue)

    def victim(self, level: int) -> Block:
        found = [block for block in self.queue if block.level == level]
        if not found:
            raise NoFreeBlock
        return min(found, key=lambda block: block.rank)

    def claim(self, block: Block, priority: int | None = None, duration: int | None = None) -> None:
        if block in self.queue:
            self.queue.remove(block)
        block.expires, block.duration = None, duration
        block.priority = block.priority if priority is None else priority

    def release(self, block: Block, to_front: bool = False) -> None:
        """`rank` is the queue that it joins; a priority that is written later counts at the next release."""
        self.queue.insert(0 if to_front else len(self.queue), block)
        block.rank = block.priority
        if block.duration is not None and block.priority != DEFAULT_PRIORITY:
            block.expires = self.clock.now + block.duration

    def refresh(self) -> None:
        due = [block for block in self.queue if block.expires is not None and block.expires <= self.clock.now]
        for block in sorted(due, key=lambda one: one.expires or 0):
            self.queue.remove(block)
            self.queue.append(block)
            block.priority = block.rank = DEFAULT_PRIORITY
            block.expires = None

    # Tree (4).

    def find(self, parent: Block | None, key: Key | None, partial: bool, copy: bool) -> tuple[bool, int, Block | None]:
        if parent is None or key is None or not key.tokens or not parent.children:
            return False, 0, None
        if key in parent.children:
            found = parent.children[key]
            return not found.full, len(key.tokens), found
        if not partial:
            return False, 0, None
        best: tuple[bool, int, Block | None] = (False, 0, None)
        for block in parent.children.values():
            if (copy or (not block.refs and not block.children)) and block.key is not None:
                count = block.key.partial_match(key)
                best = (True, count, block) if count > best[1] else best
        return best

    def free_subtree(self, block: Block) -> None:
        for child in list(block.children.values()):
            self.free_subtree(child)
        if block.in_tree:
            self.log.removed(self.window, block.name)
        self.unlink(block)

    def unlink(self, block: Block) -> None:
        if block.prev is not None:
            block.prev.children = {key: one for key, one in block.prev.children.items() if one is not block}
            block.prev = None

    def store(self, keys: Iterable[Key], blocks: Iterable[Block], pin: bool = False) -> list[int]:
        cursor, matching, pinned = self.root, True, []
        stored: list[Block] = []
        parent_name = None
        for key, block in zip(keys, blocks, strict=False):
            found = self.find(cursor, key, False, False)[2] if matching else None
            if found is not None:
                cursor = found
            else:
                parent_name = cursor.name if not stored else parent_name
                matching = False
                block.key, block.full = key, len(key.tokens) == self.size
                block.prev, block.name = cursor, (cursor.name, key)
                cursor.children.setdefault(key, block)
                stored.append(block)
                cursor = block
            if pin:
                cursor.refs += 1
                pinned.append(cursor.block_id)
        if stored:
            self.log.stored(self.window, parent_name, stored)
        return pinned

    # Taking blocks (5.4, 9).

    def take(self, owner: int, priority: int, duration: int | None) -> Block:
        block = self.victim(0)
        self.counts["alloc_total_blocks"] += 1
        self.counts["alloc_new_blocks"] += not block.has_tokens
        can_offload = block.rank >= self.threshold and self.config["onboard_blocks"]
        if block.has_tokens and can_offload and self.num_free(1):
            lower = self.victim(1)
            self.swap(block, lower)
            if block.in_tree:
                self.log.level(self.window, block.name, 0, 1)
            self.claim(block)
            self.release(block)
            block = lower
        self.free_subtree(block)
        self.claim(block, priority, duration)
        if block.owner is not None and block.owner != owner and block.owner in self.valid:
            self.valid[block.owner] = False
        block.owner = owner
        return block

    def swap(self, one: Block, two: Block) -> None:
        one.level, two.level = two.level, one.level

    def onboard(self, owner: int, block: Block) -> None:
        if block.level == 0 or not self.config["onboard_blocks"]:
            return
        carrier = self.take(owner, DEFAULT_PRIORITY, None)
        self.swap(block, carrier)
        if block.name is not None:
            self.log.level(self.window, block.name, 1, 0)
        self.release(carrier)

    def list_block(self, held: Held, block: Block, beams: Iterable[int]) -> None:
        for beam in beams:
            block.refs += 1
            held.beams[beam].append(block.block_id)
            held.allocated.append(block)

    def drop(self, block: Block, to_front: bool = False) -> None:
        if block.refs:
            block.refs -= 1
        if not block.refs:
            self.release(block, to_front)


class Clock:
    """Time by hand."""

    def __init__(self) -> None:
        self.now = 0


class Log:
    """Events in the form of the cases, with names in place of labels."""

    def __init__(self, on: bool) -> None:
        self._on = on
        self._next = 0
        self._events: list[dict[str, Any]] = []

    def add(self, window: int, kind: str, blocks: list[int]) -> None:
        self._put(window, {"type": kind, "num_blocks_per_cache_level": blocks})

    def stored(self, window: int, parent: Any, blocks: Sequence[Block]) -> None:
        told = [
            {
                "hash": block.name,
                "tokens": [token for token, _ in block.key.tokens],
                "lora_id": block.key.lora,
                "cache_level": block.level,
                "priority": block.priority,
            }
            for block in blocks
            if block.key is not None
        ]
        self._put(window, {"type": "stored", "parent": parent, "blocks": told})

    def removed(self, window: int, name: Any) -> None:
        last = self._events[-1] if self._events else {}
        if last.get("type") == "removed" and last["window"] == window:
            last["hashes"].append(name)
        else:
            self._put(window, {"type": "removed", "hashes": [name]})

    def level(self, window: int, name: Any, old: int, new: int) -> None:
        self._put(window, {"type": "updated", "hash": name, "cache_level": {"old": old, "new": new}})

    def priority(self, window: int, name: Any, old: int, new: int) -> None:
        self._put(window, {"type": "updated", "hash": name, "priority": {"old": old, "new": new}})

    def take(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events

    def _put(self, window: int, event: dict[str, Any]) -> None:
        if self._on:
            self._events.append({"window": window, "event_id": self._next} | event)
            self._next += 1
