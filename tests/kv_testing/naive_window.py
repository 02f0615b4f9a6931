"""One window of the oracle: single blocks, a tree of single blocks, the order of victims, matching.

In:  what `naive_manager` decides for a request.
Out: blocks taken, held, moved and given up.
Law: see `naive_manager`. Nothing is remembered that can be looked up: every question walks over all blocks.
"""

from dataclasses import dataclass, field
from itertools import count

from kv_core.config import ManagerConfig
from kv_core.retention import DEFAULT_PRIORITY, MIN_PRIORITY
from kv_core.spans import ceil_div
from kv_testing.packing import packed

REACH = 16
TRANSIT = -1


@dataclass(eq=False)
class Block:
    """One id. `node` is its place in the tree; `stamp` its place among the free."""

    block_id: int
    tier: int
    slot: int
    priority: int = DEFAULT_PRIORITY
    duration_ms: int | None = None
    expires_at: int | None = None
    stamp: int | None = None
    rank: tuple = (DEFAULT_PRIORITY, True)
    hidden: int = 0
    node: "Node | None" = None
    owners: int = 0
    pins: int = 0

    @property
    def held(self):
        return self.owners + self.pins


@dataclass(eq=False)
class Node:
    """One position in the tree; without a block it is a hole."""

    parent: "Node | None"
    tokens: tuple
    items: tuple
    ordinal: int
    block: Block | None = None
    children: dict = field(default_factory=dict)
    used: int = 0

    @property
    def key(self):
        return self.tokens, self.items


@dataclass(eq=False)
class Entry:
    """One position of a table: the block of each beam."""

    blocks: list


@dataclass(eq=False)
class NaiveTable:
    root: Node
    tail: Node
    start: int = 0
    published: int = 0
    entries: list = field(default_factory=list)  # from ordinal `start` on
    partial: Node | None = None
    stuck: bool = False

    @property
    def stop(self):
        return self.start + len(self.entries)

    def blocks(self, start, stop):
        """All different blocks of these ordinals, by ordinal and then by beam."""
        found = []
        for entry in self.entries[start - self.start : stop - self.start]:
            found += list(dict.fromkeys(entry.blocks))
        return found


class NaiveWindow:
    """One window, see the module."""

    def __init__(self, config: ManagerConfig, window, copies, clock_ms):
        self.config, self.size, self.copies, self.clock_ms = config, window.window, copies, clock_ms
        self.sliding = config.is_sliding(window.window)
        self.T = config.tokens_per_block
        self.num_blocks = window.num_blocks
        self.blocks = []
        self.back = self.front = 0
        self.roots = {}
        self.tables = []
        self.pins = []
        self.now = 0
        self.hit_tokens = [0, 0, 0]
        numbers = count()
        for tier, amount in enumerate(window.num_blocks):
            fresh = [Block(next(numbers), tier, slot) for slot in range(amount)]
            self.blocks += fresh
            for block in fresh:
                self.free(block)

    # Free blocks.

    def free(self, block, *, front=False, spare=False):
        """Nobody holds the block any more; a sliding window gives empty and spare ones up first."""
        assert not block.held
        block.rank = block.priority, not (self.sliding and (spare or block.node is None))
        if front:
            self.front -= 1
            block.stamp = self.front
        else:
            block.stamp = self.back
            self.back += 1
        if block.duration_ms is not None and block.priority != DEFAULT_PRIORITY:
            block.expires_at = self.clock_ms() + block.duration_ms

    def by_turn(self, blocks):
        """The blocks of a table as they are given up: the last first, in a sliding window the first."""
        return blocks if self.sliding else blocks[::-1]

    def free_all_in_front(self, blocks):
        """The first of these goes first of all."""
        for block in reversed(blocks):
            block.priority, block.duration_ms = MIN_PRIORITY, None
            self.free(block, front=True)

    def num_free(self, tier=0):
        return sum(block.stamp is not None and not block.hidden and block.tier == tier for block in self.blocks)

    def victim(self, tier):
        def may_go(block):
            if block.stamp is None or block.hidden or block.tier != tier:
                return False
            if self.sliding or block.node is None:
                return True
            return not any(child.block and child.block.tier == tier for child in block.node.children.values())

        return min((block for block in self.blocks if may_go(block)), key=lambda block: (block.rank, block.stamp))

    def hold(self, block):
        block.stamp = block.expires_at = None
        if block.node is not None:
            block.node.used = self.now

    def drop(self, block):
        """The block gives up its content."""
        block.stamp = block.expires_at = block.duration_ms = None
        block.priority = DEFAULT_PRIORITY
        node = block.node
        if node is not None:
            node.block = block.node = None
            self.prune(node)

    def prune(self, node):
        """Holes that lead nowhere go."""
        while node.parent is not None and node.block is None and not node.children and not self.anchors(node):
            del node.parent.children[node.key]
            node = node.parent

    def anchors(self, node):
        return sum(table.tail is node for table in self.tables) + sum(tail is node for tail in self.pins)

    # Taking blocks.

    def take(self, amount):
        if sum(self.num_blocks) > self.num_blocks[0] and self.config.onboard:
            return self.make_room(0, amount, 0)
        found = []
        for _ in range(amount):
            block = self.victim(0)
            self.drop(block)
            found.append(block)
        return found

    def make_room(self, tier, amount, later):
        chosen = []
        movable = set()
        below = tier + 1 < len(self.num_blocks) and self.num_blocks[tier + 1] > 0
        for _ in range(amount):
            block = self.victim(tier)
            block.stamp = None
            if block.node is not None and below:
                children = [child.block for child in block.node.children.values() if child.block]
                needed = not self.sliding and any(child.tier != TRANSIT or child in movable for child in children)
                if needed or block.priority >= self.config.offload_min_priority:
                    movable.add(block)
            block.tier = TRANSIT
            chosen.append(block)
        left = max(0, self.num_free(tier + 1) - later) if movable else 0
        moving = [block for block in chosen if block in movable][::-1][:left]
        for block in chosen:
            if block not in moving:
                if block.node is not None and not self.sliding:
                    self.drop_descendants(block.node)
                self.drop(block)
                block.tier = tier
        carriers = iter(self.make_room(tier + 1, len(moving), 0) if moving else [])
        found = []
        for block in chosen:
            if block in moving:
                carrier = next(carriers)
                block.tier = tier
                self.swap(block, carrier)
                self.restamp(block)
                found.append(carrier)
            else:
                found.append(block)
        return found

    def restamp(self, block):
        block.rank, block.stamp = (block.priority, True), self.back
        self.back += 1

    def swap(self, block, carrier):
        self.copies.append(((block.tier, block.slot), (carrier.tier, carrier.slot), self.T))
        block.tier, carrier.tier = carrier.tier, block.tier
        block.slot, carrier.slot = carrier.slot, block.slot

    def drop_descendants(self, node):
        for child in list(node.children.values()):
            self.drop_descendants(child)
            block = child.block
            self.drop(block)
            self.free_all_in_front([block])

    def onboard(self, blocks, later):
        carriers = self.make_room(0, len(blocks), max(0, later - len(blocks)))
        left = {}
        for block, carrier in zip(blocks, carriers, strict=True):
            tier = block.tier
            self.swap(block, carrier)
            left.setdefault(tier, []).append(carrier)
        for ours in left.values():
            self.free_all_in_front(ours)

    # Matching.

    def root(self, request):
        scope = (request.scope.lora, request.scope.salt, request.extra_ids is not None)
        return self.roots.setdefault(scope, Node(None, (), (), -1))

    def cut(self, sequence, ordinal, num_tokens):
        """Tokens and items of one block, of at most `num_tokens` tokens."""
        first = ordinal * self.T
        tokens = tuple(sequence.tokens[first : min(first + self.T, num_tokens)])
        extras = sequence.request.scope.extras
        items = sorted((at - first, digest) for digest, at in extras if first <= at < first + self.T)
        return tokens, tuple(items)

    def match(self, sequence, table, num_tokens):
        """The path of whole blocks, and the block that serves the next one in part."""
        if not num_tokens:
            return [table.root], None
        path = self.path(sequence, table, num_tokens)
        can_serve = self.config.copy_on_partial or len(path) - 1 < self.num_shared(sequence)
        partial = self.config.partial_reuse and can_serve
        source = self.source(sequence, path[-1], len(path) - 1, num_tokens) if partial else None
        return path, source

    def path(self, sequence, table, num_tokens):
        """The root and the nodes of leading whole blocks."""
        path = [table.root]
        for ordinal in range(num_tokens // self.T):
            child = path[-1].children.get(self.cut(sequence, ordinal, num_tokens))
            if child is None:
                break
            path.append(child)
        return path

    def lookup(self, sequence, table):
        """How many tokens are there, and the ids of their blocks."""
        num_tokens = sequence.num_tokens
        path = self.path(sequence, table, num_tokens)
        source = self.source(sequence, path[-1], len(path) - 1, num_tokens, to_read=True)
        nodes = path[1:] + ([] if source is None else [source[0]])
        ids = tuple(None if node.block is None else node.block.block_id for node in nodes)
        return (len(path) - 1) * self.T + (0 if source is None else source[1]), ids

    def num_shared(self, sequence):
        """Leading blocks that all beams share."""
        num_blocks = ceil_div(sequence.num_tokens, self.T)
        if sequence.beam_width == 1 or self.config.cache_type.value == "cross":
            return num_blocks
        return num_blocks if sequence.num_tokens % self.T == 0 and not self.config.reuse else num_blocks - 1

    def source(self, sequence, parent, ordinal, num_tokens, *, to_read=False):
        tokens, items = self.cut(sequence, ordinal, num_tokens)
        if not tokens:
            return None
        width = None if sequence.request.extra_ids is None else 16
        wanted = packed(tokens, (), width)
        children = sorted(parent.children.values(), key=lambda child: packed(child.tokens, child.items, width))
        at = sum(packed(child.tokens, child.items, width) < wanted for child in children)
        best = None
        for child in children[max(0, at - REACH) : at + REACH]:
            common = 0
            for ours, theirs in zip(tokens, child.tokens, strict=False):
                if ours != theirs:
                    break
                common += 1
            if items != child.items:
                common = min([common, *(found[0][0] for found in (items, child.items) if found)])
            if child.block is None or not common or not (to_read or self.may_serve(child)):
                continue
            rank = common, -child.block.tier, child.used, -child.block.block_id
            if best is None or rank > best[0]:
                best = rank, child
        return None if best is None else (best[1], best[0][0])

    def is_leaf(self, node):
        return not node.children and not self.anchors(node)

    def may_serve(self, node):
        return self.config.copy_on_partial or (self.is_leaf(node) and not (node.block.held or node.block.hidden))

    def longest(self, path, source, limit):
        whole = (len(path) - 1) * self.T
        length = min(limit, whole + (source[1] if source else 0))
        while length:
            ordinal, inside = divmod(length, self.T)
            if inside and length < whole:
                node = path[ordinal + 1]
                if node.block is None or not self.config.partial_reuse or not self.may_serve(node):
                    length -= inside
                    continue
            first = max(0, length - self.size + 1) // self.T if self.sliding else 0
            missing = [at for at in range(first, ordinal) if path[at + 1].block is None]
            if not missing:
                return length
            length = missing[-1] * self.T
        return 0
