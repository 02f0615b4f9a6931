"""A cache manager with lists and dicts, one object a block: the oracle of kv_core's manager.

In:  the calls that the real manager gets.
Out: what it must answer: the same block ids, copies and counts.
Law: obviously right before fast. Every rule is written for single blocks, as docs/decisions/0003-runs-of-blocks.md states
     them; nothing is shared with the real manager but its values. Each question is answered by looking at everything.
"""

import struct
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from kv_core.config import ManagerConfig
from kv_core.request import Request
from kv_core.retention import DEFAULT_PRIORITY, MIN_PRIORITY, Retention
from kv_core.spans import ceil_div

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
    rank: int = DEFAULT_PRIORITY
    hidden: bool = False
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


@dataclass(eq=False)
class NaiveSequence:
    request: Request
    beam_width: int
    tokens: list | None
    num_tokens: int
    tables: list
    shared: int = 0

    def wish(self, ordinal, size, reuse):
        config = self.request.retention
        if config is None or not reuse:
            return Retention()
        wishes = config.per_block(size, self.request.length)
        return wishes[ordinal] if ordinal < len(wishes) else config.decode


@dataclass(eq=False)
class NaivePin:
    held: list  # (window, tail, blocks) by window


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
        numbers = count()
        for tier, amount in enumerate(window.num_blocks):
            fresh = [Block(next(numbers), tier, slot) for slot in range(amount)]
            self.blocks += fresh
            for block in fresh:
                self.free(block)

    # Free blocks.

    def free(self, block, *, front=False):
        """Nobody holds the block any more."""
        assert not block.held
        block.rank = block.priority
        if front:
            self.front -= 1
            block.stamp = self.front
        else:
            block.stamp = self.back
            self.back += 1
        if block.duration_ms is not None and block.priority != DEFAULT_PRIORITY:
            block.expires_at = self.clock_ms() + block.duration_ms

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
        block.rank, block.stamp = block.priority, self.back
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
        path = [table.root]
        if not num_tokens:
            return path, None
        for ordinal in range(num_tokens // self.T):
            child = path[-1].children.get(self.cut(sequence, ordinal, num_tokens))
            if child is None:
                break
            path.append(child)
        partial = self.config.partial_reuse and (self.config.copy_on_partial or sequence.beam_width == 1)
        source = self.source(sequence, path[-1], len(path) - 1, num_tokens) if partial else None
        return path, source

    def source(self, sequence, parent, ordinal, num_tokens):
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
            if child.block is None or not common or not self.may_serve(child):
                continue
            rank = common, -child.block.tier, child.used, -child.block.block_id
            if best is None or rank > best[0]:
                best = rank, child
        return None if best is None else (best[1], best[0][0])

    def is_leaf(self, node):
        return not node.children and not self.anchors(node)

    def may_serve(self, node):
        return self.config.copy_on_partial or (self.is_leaf(node) and not node.block.held)

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


class NaiveManager:
    """The whole manager, see the module."""

    def __init__(self, config: ManagerConfig, clock_ms):
        self.config = config
        self.copies = []
        self.windows = [NaiveWindow(config, window, self.copies, clock_ms) for window in config.windows]
        self.sequences = {}
        self.pins = []
        self.now = 0
        self.clock_ms = clock_ms

    # Admitting.

    def add(self, request, beam_width=1):
        tokens = None
        if request.tokens is not None and self.config.reuse:
            extra = request.extra_ids or [0] * len(request.tokens)
            tokens = list(zip([token % (1 << 32) for token in request.tokens], extra, strict=True))
        tables = []
        for window in self.windows:
            root = Node(None, (), (), -1) if tokens is None else window.root(request)
            tables.append(NaiveTable(root, root))
        sequence = NaiveSequence(request, beam_width, tokens, request.length, tables)
        limit = 0 if tokens is None else request.length - 1
        pairs = list(zip(self.windows, tables, strict=True))
        found = [window.match(sequence, table, limit) for window, table in pairs]
        while True:
            length = limit
            while True:
                shorter = min(window.longest(*match, length) for window, match in zip(self.windows, found, strict=True))
                if shorter == length:
                    break
                length = shorter
            plans = [
                self.plan(window, sequence, match, length) for window, match in zip(self.windows, found, strict=True)
            ]
            if all(plan["needed"] <= plan["available"] for plan in plans):
                break
            if length % self.config.tokens_per_block == 0:
                return None
            limit = length - length % self.config.tokens_per_block
        self.now += 1
        for window, table, plan in zip(self.windows, tables, plans, strict=True):
            window.now = self.now
            window.tables.append(table)
            self.carry_out(window, sequence, table, plan)
        self.sequences[request.request_id] = sequence
        return length

    def plan(self, window, sequence, match, length):
        path, source = match
        T = window.T
        whole, inside = divmod(length, T)
        start = max(0, length - window.size + 1) // T if window.sliding else 0
        wanted = None
        if inside:
            wanted = source[0] if length > (len(path) - 1) * T else path[whole + 1]
        num_blocks = ceil_div(sequence.num_tokens, T)
        shared = num_blocks
        if sequence.beam_width > 1 and self.config.cache_type.value != "cross":
            ends = sequence.num_tokens % T == 0 and not self.config.reuse
            shared = num_blocks if ends else num_blocks - 1
        empty = sum(1 if at < shared else sequence.beam_width for at in range(whole, num_blocks))
        claimed = [node.block for node in path[start + 1 : whole + 1]]
        lower = sum(block.tier > 0 for block in claimed)
        available = window.num_free() - sum(block.tier == 0 and not block.held for block in claimed)
        takes_over = False
        if wanted is not None:
            block = wanted.block
            on_device = block.tier == 0 and not block.held
            if not block.held and window.is_leaf(wanted) and sequence.beam_width == 1:
                is_partial = len(wanted.tokens) < T
                takes_over = is_partial or not self.config.copy_on_partial or empty + lower > available - on_device
            available -= on_device
            if takes_over:
                empty -= 1
                lower += block.tier > 0
        return {
            "start": start,
            "whole": whole,
            "path": path[: whole + 1],
            "wanted": wanted,
            "inside": inside,
            "takes_over": takes_over,
            "empty": empty,
            "shared": shared,
            "needed": empty + lower,
            "available": available,
        }

    def carry_out(self, window, sequence, table, plan):
        start, whole, wanted = plan["start"], plan["whole"], plan["wanted"]
        path = plan["path"][start + 1 :]
        sequence.shared = plan["shared"]
        table.start, table.published, table.tail = start, whole, plan["path"][-1]
        for node in path:
            window.hold(node.block)
            node.block.owners += 1
            self.keep(node.block, sequence.wish(node.ordinal, window.T, self.config.reuse))
        lower = [node.block for node in path if node.block.tier > 0]
        own = None
        if wanted is not None and plan["takes_over"]:
            own = wanted.block
            priority, duration = own.priority, own.duration_ms
            window.drop(own)
            wish = sequence.wish(whole, window.T, self.config.reuse)
            if wish.priority is None:
                own.priority, own.duration_ms = priority, duration
            lower += [own] if own.tier > 0 else []
        elif wanted is not None and not wanted.block.held:
            wanted.block.hidden = True
        if lower:
            window.onboard(lower, plan["empty"])
        taken = window.take(plan["empty"])
        if wanted is not None and not plan["takes_over"]:
            source = wanted.block
            source.hidden = False
            copies = 1 if whole < plan["shared"] else sequence.beam_width
            for block in taken[:copies]:
                self.copies.append(((source.tier, source.slot), (block.tier, block.slot), plan["inside"]))
        table.entries = [Entry([node.block] * sequence.beam_width) for node in path]
        fresh = iter(taken)
        for ordinal in range(whole, ceil_div(sequence.num_tokens, window.T)):
            if ordinal == whole and own is not None:
                own.owners += 1
                self.wish_private(window, sequence, ordinal, own, keep=True)
                table.entries.append(Entry([own]))
            elif ordinal < plan["shared"]:
                block = next(fresh)
                self.own(window, sequence, ordinal, [block])
                table.entries.append(Entry([block] * sequence.beam_width))
            else:
                blocks = [next(fresh) for _ in range(sequence.beam_width)]
                self.own(window, sequence, ordinal, blocks)
                table.entries.append(Entry(blocks))

    def own(self, window, sequence, ordinal, blocks):
        for block in blocks:
            block.owners += 1
            self.wish_private(window, sequence, ordinal, block, keep=False)

    def wish_private(self, window, sequence, ordinal, block, *, keep):
        wish = sequence.wish(ordinal, window.T, self.config.reuse)
        if wish.priority is not None:
            block.priority, block.duration_ms = wish.priority, wish.duration_ms
        elif not keep:
            block.priority, block.duration_ms = DEFAULT_PRIORITY, None

    def keep(self, block, wish):
        if wish.priority is None:
            return
        if block.held > 1:
            wish = Retention(block.priority, block.duration_ms).stronger(wish)
        block.priority, block.duration_ms = wish.priority, wish.duration_ms

    # Giving up.

    def let_go(self, window, block):
        block.owners -= 1
        if not block.held:
            window.free(block)

    def release(self, request_id, *, publish=True, num_filled=None, pin=False):
        sequence = self.sequences[request_id]
        if publish:
            self.publish(request_id, num_filled, partial=True)
        pinned = self.pin(request_id) if pin else None
        for window, table in zip(self.windows, sequence.tables, strict=True):
            for block in reversed(table.blocks(table.start, table.stop)):
                self.let_go(window, block)
            window.tables.remove(table)
            window.prune(table.tail)
        del self.sequences[request_id]
        return pinned

    def pin(self, request_id):
        sequence = self.sequences[request_id]
        held = []
        for window, table in zip(self.windows, sequence.tables, strict=True):
            blocks = table.blocks(table.start, table.stop)
            for block in blocks:
                block.pins += 1
            for block in table.blocks(table.start, max(table.published, table.start)):
                block.node.used = window.now
            window.pins.append(table.tail)
            held.append((window, table.tail, blocks))
        pin = NaivePin(held)
        self.pins.append(pin)
        return pin

    def unpin(self, pin):
        self.pins.remove(pin)
        for window, tail, blocks in pin.held:
            for block in reversed(blocks):
                block.pins -= 1
                if not block.held:
                    window.free(block)
            window.pins.remove(tail)
            window.prune(tail)

    # Growing.

    def front(self, window, table, length):
        if not window.sliding:
            return 0
        return max(table.start, (length - self.config.max_rewind - window.size) // window.T)

    def grow(self, request_id, num_tokens):
        sequence = self.sequences[request_id]
        length = sequence.num_tokens + num_tokens
        pairs = list(zip(self.windows, sequence.tables, strict=True))
        for window, table in pairs:
            needed = max(0, ceil_div(length, window.T) - table.stop) * sequence.beam_width
            dropped = table.blocks(table.start, max(table.start, self.front(window, table, length)))
            if needed > window.num_free() + sum(block.held == 1 for block in dropped):
                return False
        for window, table in pairs:
            stop = self.front(window, table, length)
            if sequence.tokens is not None and not sequence.request.is_dummy and sequence.beam_width == 1:
                known = min(stop, len(sequence.tokens) // window.T)
                if known > max(table.published, table.start):
                    self.publish_table(window, sequence, table, known, 0)
            if stop > table.start:
                self.detach(window, table, stop)
            ordinals = range(table.stop, ceil_div(length, window.T))
            fresh = iter(window.take(len(ordinals) * sequence.beam_width))
            for ordinal in ordinals:
                blocks = [next(fresh) for _ in range(sequence.beam_width)]
                self.own(window, sequence, ordinal, blocks)
                table.entries.append(Entry(blocks))
        sequence.num_tokens = length
        return True

    def detach(self, window, table, stop):
        for block in reversed(table.blocks(table.start, stop)):
            self.let_go(window, block)
        if table.partial is not None and stop > table.published:
            table.partial = None
        del table.entries[: stop - table.start]
        table.start = stop

    def rewind(self, request_id, num_tokens):
        sequence = self.sequences[request_id]
        length = sequence.num_tokens - num_tokens
        pairs = list(zip(self.windows, sequence.tables, strict=True))
        copies = [self.needs_copy(window, table, length) for window, table in pairs]
        if any(needs and not window.num_free() for needs, (window, _) in zip(copies, pairs, strict=True)):
            return False
        for needs, (window, table) in zip(copies, pairs, strict=True):
            self.shrink(window, sequence, table, length, needs)
        sequence.num_tokens = length
        if sequence.tokens is not None:
            del sequence.tokens[length:]
        return True

    def needs_copy(self, window, table, length):
        ordinal, inside = divmod(length, window.T)
        if not inside or ordinal >= table.published:
            return False
        node = table.tail
        return node.ordinal > ordinal or node.block.held > 1 or window.anchors(node) > 1 or bool(node.children)

    def shrink(self, window, sequence, table, length, needs_copy):
        T = window.T
        stop = ceil_div(length, T)
        ordinal, inside = divmod(length, T)
        while table.stop > max(stop, table.published + (table.partial is not None)):
            block = table.entries.pop().blocks[0]
            block.owners -= 1
            if not block.held:
                window.free(block, front=True)
        if table.partial is not None:
            if stop <= table.published:
                self.let_go(window, table.entries.pop().blocks[0])
                table.partial = None
            elif table.published * T + len(table.partial.tokens) > length:
                self.withdraw(window, table.partial)
                table.partial = None
        if stop < table.published:
            self.unpublish(window, table, stop)
            del table.entries[stop - table.start :]
        if inside and ordinal < table.published:
            if needs_copy:
                self.replace(window, sequence, table, ordinal, inside)
            else:
                node = table.tail
                table.tail = node.parent
                table.published = ordinal
                self.withdraw(window, node)

    def withdraw(self, window, node):
        """A block leaves the tree and goes on as a private one."""
        node.block.node = None
        node.block = None
        window.prune(node)

    def unpublish(self, window, table, ordinal):
        for entry in reversed(table.entries[max(ordinal, table.start) - table.start : table.published - table.start]):
            self.let_go(window, entry.blocks[0])
        tail = old = table.tail
        while tail.ordinal >= ordinal:
            tail = tail.parent
        table.tail, table.published = tail, ordinal
        window.prune(old)

    def replace(self, window, sequence, table, ordinal, num_tokens):
        old = [entry.blocks[0] for entry in table.entries[ordinal - table.start : table.published - table.start]]
        new = window.take(len(old))
        for ours, fresh in zip(old, new, strict=True):
            self.copies.append(((ours.tier, ours.slot), (fresh.tier, fresh.slot), num_tokens))
        published = table.published
        self.unpublish(window, table, ordinal)
        for at, fresh in zip(range(ordinal, published), new, strict=True):
            self.own(window, sequence, at, [fresh])
            entry = table.entries[at - table.start]
            table.entries[at - table.start] = Entry([fresh if block in old else block for block in entry.blocks])

    def make_writable(self, request_id, ordinal):
        sequence = self.sequences[request_id]
        pairs = list(zip(self.windows, sequence.tables, strict=True))
        for window, table in pairs:
            beams = max(0, sequence.shared - ordinal) * (sequence.beam_width - 1)
            if beams + max(0, table.published - ordinal) > window.num_free():
                return False
        for window, table in pairs:
            if table.partial is not None and ordinal <= table.published:
                self.withdraw(window, table.partial)
                table.partial = None
            if sequence.beam_width > 1 and ordinal < sequence.shared:
                self.separate_beams(window, sequence, table, ordinal)
            if ordinal < table.published:
                self.replace(window, sequence, table, ordinal, window.T)
        if sequence.beam_width > 1:
            sequence.shared = min(sequence.shared, ordinal)
        return True

    def separate_beams(self, window, sequence, table, ordinal):
        others = sequence.beam_width - 1
        taken = window.take((sequence.shared - ordinal) * others)
        for beam in range(others):
            for at, fresh in zip(range(ordinal, sequence.shared), taken[beam::others], strict=True):
                entry = table.entries[at - table.start]
                source = entry.blocks[0]
                self.copies.append(((source.tier, source.slot), (fresh.tier, fresh.slot), window.T))
                self.own(window, sequence, at, [fresh])
                entry.blocks[beam + 1] = fresh

    # Publishing.

    def extend(self, request_id, tokens):
        sequence = self.sequences[request_id]
        if sequence.tokens is not None:
            sequence.tokens += [(token % (1 << 32), 0) for token in tokens]

    def publish(self, request_id, num_filled=None, *, partial=False):
        sequence = self.sequences[request_id]
        if sequence.tokens is None or sequence.request.is_dummy:
            return
        known = len(sequence.tokens)
        num_filled = known - 1 if num_filled is None else min(num_filled, known)
        stop, tail = divmod(max(0, num_filled), self.config.tokens_per_block)
        last = sequence.shared if sequence.beam_width > 1 else sequence.tables[0].stop
        if stop >= last or sequence.beam_width > 1:
            stop, tail = min(stop, last), 0
        for window, table in zip(self.windows, sequence.tables, strict=True):
            self.publish_table(window, sequence, table, stop, tail if partial else 0)

    def publish_table(self, window, sequence, table, stop, tail):
        if table.stuck or not self.anything_new(table, stop, tail):
            return
        if table.partial is not None:
            self.withdraw(window, table.partial)
            table.partial = None
        while table.published < min(table.start, stop):
            self.advance(window, table, self.child(window, sequence, table))
        while table.published < stop and not table.stuck:
            self.publish_block(window, sequence, table)
        if tail and table.published == stop and not table.stuck and table.start <= stop < table.stop:
            tokens, items = window.cut(sequence, stop, stop * window.T + tail)
            if not window.cut(sequence, stop, 1 << 60)[1] and (tokens, ()) not in table.tail.children:
                node = Node(table.tail, tokens, items, stop, used=window.now)
                table.tail.children[node.key] = node
                node.block = table.entries[stop - table.start].blocks[0]
                node.block.node = node
                table.partial = node

    def anything_new(self, table, stop, tail):
        if stop > table.published:
            return True
        if stop < table.published or not tail or stop < table.start:
            return False
        return table.partial is None or len(table.partial.tokens) < tail

    def child(self, window, sequence, table):
        ordinal = table.published
        tokens, items = window.cut(sequence, ordinal, 1 << 60)
        found = table.tail.children.get((tokens, items))
        if found is None:
            found = Node(table.tail, tokens, items, ordinal, used=window.now)
            table.tail.children[found.key] = found
        return found

    def advance(self, window, table, node):
        old, table.tail = table.tail, node
        table.published = node.ordinal + 1
        window.prune(old)

    def publish_block(self, window, sequence, table):
        own = table.entries[table.published - table.start].blocks[0]
        node = self.child(window, sequence, table)
        if node.block is None:
            node.block, own.node, node.used = own, node, window.now
        elif own.pins:
            table.stuck = True
            return
        elif node.block.tier == 0:
            theirs = node.block
            window.hold(theirs)
            theirs.owners += 1
            own.owners -= 1
            self.swap_entry(table, own, theirs)
            window.free_all_in_front([own])
        else:
            theirs = node.block
            theirs.stamp = theirs.expires_at = None
            own.priority, own.duration_ms = theirs.priority, theirs.duration_ms
            theirs.node = None
            node.block, own.node, node.used = own, node, window.now
            window.free_all_in_front([theirs])
        self.advance(window, table, node)

    def swap_entry(self, table, own, theirs):
        entry = table.entries[table.published - table.start]
        entry.blocks = [theirs if block is own else block for block in entry.blocks]

    # Time.

    def refresh(self):
        now, num = self.clock_ms(), 0
        for window in self.windows:
            due = [block for block in window.blocks if block.expires_at is not None and block.expires_at <= now]
            for block in sorted(due, key=lambda block: (block.expires_at, block.stamp)):
                block.priority, block.duration_ms, block.expires_at = DEFAULT_PRIORITY, None, None
                window.free(block)
                num += 1
        return num

    # What can be seen.

    def block_ids(self, request_id, window_at, beam):
        table = self.sequences[request_id].tables[window_at]
        return [None] * table.start + [entry.blocks[beam].block_id for entry in table.entries]

    def tree(self, window_at):
        """Every cached block: its path of keys, id, tier, priority and whether it is held."""
        found = {}
        for scope, root in self.windows[window_at].roots.items():
            waiting = [(child, (scope, child.key)) for child in root.children.values()]
            while waiting:
                node, path = waiting.pop()
                if node.block is not None:
                    block = node.block
                    found[path] = (block.block_id, block.tier, block.priority, bool(block.held))
                waiting += [(child, (*path, child.key)) for child in node.children.values()]
        return found

    def check(self):
        """The oracle's own laws, so that it cannot be wrong in silence."""
        for at, window in enumerate(self.windows):
            owners = Counter()
            for sequence in self.sequences.values():
                table = sequence.tables[at]
                for block in table.blocks(table.start, table.stop):
                    owners[block] += 1
            for block in window.blocks:
                assert block.owners == owners[block]
                assert (block.stamp is None) == bool(block.held), (block, "free xor held")
                assert not block.held or block.tier == 0


def packed(tokens, items, width):
    """The order of bytes in which the real manager keeps siblings."""
    if width is None:
        found = b"".join(struct.pack("<I", token) for token, _ in tokens)
    else:
        found = b"".join(struct.pack("<QQ", token, extra) for token, extra in tokens)
    if items:
        found += struct.pack("<Q", len(items))
        for offset, digest in items:
            found += struct.pack("<QQ", offset, len(digest)) + digest
    return found
