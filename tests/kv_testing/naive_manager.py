"""A cache manager with lists and dicts, one object a block: the oracle of kv_core's manager.

In:  the calls that the real manager gets.
Out: what it must answer: the same block ids, copies and counts.
Law: obviously right before fast. Every rule is written for single blocks, as docs/decisions/0003-runs-of-blocks.md has
     them; nothing is shared with the real manager but its values. Longer than a file should be, because one page has to
     hold all that an operation does to a block.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from kv_core.config import ManagerConfig
from kv_core.request import Request
from kv_core.retention import DEFAULT_PRIORITY, Retention
from kv_core.spans import ceil_div
from kv_testing.naive_window import TRANSIT, Entry, NaiveTable, NaiveWindow, Node


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
    held: list  # (window, tail, blocks), one or more a window
    paths: dict  # blocks that were in the tree, by window
    waiting: set  # given up, but others of the pin hang on them


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
        sequence = self.begin(request, beam_width)
        return self.admit(sequence, *self.decide(sequence))

    def add_all(self, requests):
        """What all of them find is out of the victims' way until their turn."""
        waiting = []
        for request in requests:
            sequence = self.begin(request, 1)
            _, plans = self.decide(sequence)
            found, tails = [], []
            for window, plan in zip(self.windows, plans, strict=True):
                found += [node.block for node in plan["path"][plan["start"] + 1 :]]
                found += [plan["wanted"].block] if plan["wanted"] is not None else []
                window.pins.append(plan["path"][-1])
                tails.append(plan["path"][-1])
            for block in found:
                block.hidden += 1
            waiting.append((sequence, found, tails))
        answers = []
        for sequence, found, tails in waiting:
            for block in found:
                block.hidden -= 1
            for window, tail in zip(self.windows, tails, strict=True):
                window.pins.remove(tail)
                window.prune(tail)
            answers.append(self.admit(sequence, *self.decide(sequence)))
        return answers

    def begin(self, request, beam_width):
        tokens = None
        if request.tokens is not None and self.config.reuse:
            extra = request.extra_ids or [0] * len(request.tokens)
            tokens = list(zip([token % (1 << 32) for token in request.tokens], extra, strict=True))
        tables = []
        for window in self.windows:
            root = Node(None, (), (), -1) if tokens is None else window.root(request)
            tables.append(NaiveTable(root, root))
        return NaiveSequence(request, beam_width, tokens, request.length, tables)

    def decide(self, sequence):
        """The longest length that all windows can serve, and what each would do."""
        limit = 0 if sequence.tokens is None else sequence.num_tokens - 1
        pairs = list(zip(self.windows, sequence.tables, strict=True))
        found: list[Any] = [window.match(sequence, table, limit) for window, table in pairs]
        while True:
            length = limit
            while True:
                shorter = min(
                    window.longest(path, source, length)
                    for window, (path, source) in zip(self.windows, found, strict=True)
                )
                if shorter == length:
                    break
                length = shorter
            plans = [
                self.plan(window, sequence, match, length) for window, match in zip(self.windows, found, strict=True)
            ]
            inside = length % self.config.tokens_per_block
            if not inside or all(plan["needed"] <= plan["available"] for plan in plans):
                return length, plans
            limit = length - inside

    def admit(self, sequence, length, plans):
        if any(plan["needed"] > plan["available"] for plan in plans):
            return None
        self.now += 1
        for window, table, plan in zip(self.windows, sequence.tables, plans, strict=True):
            window.now = self.now
            window.tables.append(table)
            self.carry_out(window, sequence, table, plan)
        self.sequences[sequence.request.request_id] = sequence
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
        shared = window.num_shared(sequence)
        empty = sum(1 if at < shared else sequence.beam_width for at in range(whole, num_blocks))
        claimed = [node.block for node in path[start + 1 : whole + 1]]
        lower = sum(block.tier > 0 for block in claimed)
        available = window.num_free() - sum(block.tier == 0 and not (block.held or block.hidden) for block in claimed)
        takes_over = False
        if wanted is not None:
            block = wanted.block
            needed = block.held or block.hidden
            on_device = block.tier == 0 and not needed
            if not needed and window.is_leaf(wanted) and whole < shared:
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
        elif wanted is not None:
            wanted.block.hidden += 1
        if lower:
            window.onboard(lower, plan["empty"])
        taken = window.take(plan["empty"])
        if wanted is not None and not plan["takes_over"]:
            source = wanted.block
            source.hidden -= 1
            copies = 1 if whole < plan["shared"] else sequence.beam_width
            for block in taken[:copies]:
                self.copies.append(((source.tier, source.slot), (block.tier, block.slot), plan["inside"]))
        table.entries = [Entry([node.block] * sequence.beam_width) for node in path]
        self.fill(window, sequence, table, plan, own, iter(taken))

    def fill(self, window, sequence, table, plan, own, fresh):
        whole = plan["whole"]
        for ordinal in range(whole, ceil_div(sequence.num_tokens, window.T)):
            if ordinal == whole and own is not None:
                own.owners += 1
                self.wish_private(window, sequence, ordinal, own, keep=True)
                table.entries.append(Entry([own] * sequence.beam_width))
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

    def let_go(self, window, block, *, spare=False):
        block.owners -= 1
        if not block.held:
            window.free(block, spare=spare)

    def release(self, request_id, *, publish=True, num_filled=None, pin=False):
        sequence = self.sequences[request_id]
        if publish:
            self.publish(request_id, num_filled, partial=True)
        pinned = self.pin(request_id) if pin else None
        for window, table in zip(self.windows, sequence.tables, strict=True):
            for block in window.by_turn(table.blocks(table.start, table.stop)):
                # Whatever the next prompt shares of the last window of what is published, it reads one window before.
                behind = block.node is not None and (block.node.ordinal + 1) * window.T
                self.let_go(window, block, spare=behind and behind + 2 * window.size <= table.published * window.T)
            window.tables.remove(table)
            window.prune(table.tail)
        del self.sequences[request_id]
        return pinned

    def pin(self, request_id):
        sequence = self.sequences[request_id]
        held, paths = [], {}
        for window, table in zip(self.windows, sequence.tables, strict=True):
            blocks = table.blocks(table.start, table.stop)
            for block in blocks:
                block.pins += 1
            paths[window] = table.blocks(table.start, max(table.published, table.start))
            for block in paths[window]:
                block.node.used = window.now
            window.pins.append(table.tail)
            held.append((window, table.tail, blocks))
        pin = NaivePin(held, paths, set())
        self.pins.append(pin)
        return pin

    def unpin(self, pin, at=None, given=()):
        """Give up all, or blocks of one window: there the last ones first, if it is not sliding."""
        for window in self.windows if at is None else [self.windows[at]]:
            mine = [(tail, blocks) for ours, tail, blocks in pin.held if ours is window]
            listed = [block for _, blocks in mine for block in blocks]
            pin.waiting |= set(listed) if at is None else {window.blocks[block_id] for block_id in given}
            wanted = pin.waiting & set(listed)
            if not window.sliding:
                wanted = set(takewhile(wanted.__contains__, reversed(listed)))
            pin.held = [held for held in pin.held if held[0] is not window]
            pieces = []
            for tail, blocks in window.by_turn(mine):
                window.pins.remove(tail)
                pieces.append(self.unpin_piece(window, tail, blocks, wanted, pin.paths[window]))
            pin.held += [piece for kept in window.by_turn(pieces) for piece in kept]
            pin.waiting -= wanted
        if not pin.held:
            self.pins.remove(pin)

    def unpin_piece(self, window, tail, blocks, wanted, path):
        """Give up what is wanted of blocks in a row; what is kept, in pieces that follow each other."""
        pieces = [(window, tail, [])]
        for block in blocks:
            if block in wanted:
                pieces.append((window, tail, []))
            elif block in path:
                pieces[-1] = (window, block.node, [*pieces[-1][2], block])
            else:
                pieces.append((window, tail, [block]))
        for block in window.by_turn(blocks):
            if block in wanted:
                block.pins -= 1
                if not block.held:
                    window.free(block)
        pieces = [piece for piece in pieces if piece[2]]
        window.pins += [end for _, end, _ in pieces]
        window.prune(tail)
        return pieces

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
            dropped = table.blocks(table.start, max(table.start, self.front(window, table, sequence.num_tokens + 1)))
            if needed > window.num_free() + sum(block.held == 1 for block in dropped):
                return False
        for window, table in pairs:
            stop = self.front(window, table, sequence.num_tokens + 1)
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
        for block in window.by_turn(table.blocks(table.start, stop)):
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
        for entry in window.by_turn(
            table.entries[max(ordinal, table.start) - table.start : table.published - table.start]
        ):
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

    # Single blocks.

    def set_priority(self, at, block_id, priority):
        block = self.windows[at].blocks[block_id]
        if block.node is None and not block.owners:
            return False
        block.priority = priority
        if block.node is None:
            block.duration_ms = None
        return True

    def lost(self, lost):
        """Blocks, as (window number, id), lose their bytes. The requests that held one, or None if a pin does."""
        blocks = [(self.windows[at], self.windows[at].blocks[block_id]) for at, block_id in lost]
        if any(block.pins for _, block in blocks):
            return None
        owned = {id(block) for _, block in blocks}
        victims = [
            name
            for name, sequence in self.sequences.items()
            if any(id(block) in owned for table in sequence.tables for block in table.blocks(table.start, table.stop))
        ]
        for name in victims:
            self.release(name, publish=False)
        for window, block in blocks:
            if block.node is not None:
                if not window.sliding:
                    window.drop_descendants(block.node)
                window.drop(block)
                window.free_all_in_front([block])
        return victims

    def offload(self, at, block_id):
        window, block = self.windows[at], self.windows[at].blocks[block_id]
        tier = block.tier
        if not self.config.onboard or block.node is None or block.held:
            return False
        if tier == 2 or not window.num_free(tier + 1):
            return False
        if not window.sliding and any(child.block.tier == tier for child in block.node.children.values()):
            return False
        block.stamp, block.tier = None, TRANSIT
        [carrier] = window.make_room(tier + 1, 1, 0)
        block.tier = tier
        window.swap(block, carrier)
        window.restamp(block)
        carrier.priority, carrier.duration_ms = DEFAULT_PRIORITY, None
        window.free(carrier)
        return True

    def onboard(self, at, block_id):
        window, block = self.windows[at], self.windows[at].blocks[block_id]
        if block.tier == 0:
            return True
        if block.node is None:
            return False
        parent = block.node.parent
        if not window.sliding and parent.block is not None and parent.block.tier:
            return False
        path = [block]
        while not window.sliding and path[-1].node.parent.block is not None:
            path.append(path[-1].node.parent.block)
        for ours in path:
            window.hold(ours)
            ours.owners += 1
        if window.num_free():
            window.onboard([block], 0)
        for ours in path:
            self.let_go(window, ours)
        return block.tier == 0

    def num_free_without(self, names, at):
        window = self.windows[at]
        held = Counter()
        for name in names:
            table = self.sequences[name].tables[at]
            held.update(table.blocks(table.start, table.stop))
        return window.num_free() + sum(block.held == num for block, num in held.items())

    # What can be seen.

    def block_ids(self, request_id, window_at, beam):
        table = self.sequences[request_id].tables[window_at]
        return [None] * table.start + [entry.blocks[beam].block_id for entry in table.entries]

    def tree(self, window_at):
        """Every cached block: its path of keys, id, tier, priority and whether it is held."""
        found = {}
        for scope, root in self.windows[window_at].roots.items():
            waiting: list[tuple] = [(child, (scope, child.key)) for child in root.children.values()]
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
