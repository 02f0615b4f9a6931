"""A cache manager with lists and dicts, one object a block: the oracle of kv_core's manager.

In:  the calls that the real manager gets.
Out: what it must answer: the same block ids, copies and counts.
Law: obviously right before fast. Every rule is written for single blocks, as docs/decisions/0003-runs-of-blocks.md has
     them; nothing is shared with the real manager but its values. A file for each thing that one does to a request:
     `naive_admitting`, `naive_growing`, `naive_publishing`; here what ends it, and what is done to single blocks.
"""

from collections import Counter
from itertools import takewhile

from kv_core.retention import DEFAULT_PRIORITY
from kv_testing.naive_admitting import NaiveAdmitting
from kv_testing.naive_growing import NaiveGrowing
from kv_testing.naive_state import NaivePin
from kv_testing.naive_window import TRANSIT


class NaiveManager(NaiveAdmitting, NaiveGrowing):
    """The whole manager, see the module."""

    # Giving up.

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

    def lookup(self, request, at):
        """Cached tokens of a prompt in one window, and the ids of their blocks."""
        sequence = self.begin(request, 1)
        return (0, ()) if sequence.tokens is None else self.windows[at].lookup(sequence, sequence.tables[at])

    def num_missing(self, request):
        """The length up to the first full block that some window does not have; None if there is none."""
        sequence = self.begin(request, 1)
        T = self.config.tokens_per_block
        whole = request.length // T * T
        if sequence.tokens is None:
            return None
        stop = self.agreed(self.found(sequence, whole), whole) // T * T + T
        return None if stop > whole else stop

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
