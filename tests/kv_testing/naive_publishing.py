"""How the naive manager puts blocks into its tree, and takes them out again (see `naive_manager`)."""

from kv_testing.naive_state import NaiveState
from kv_testing.naive_window import Node


class NaivePublishing(NaiveState):
    """Publishing."""

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

    def withdraw(self, window, node):
        """A block leaves the tree and goes on as a private one."""
        node.block.node = None
        node.block = None
        window.prune(node)
