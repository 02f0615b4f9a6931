"""How tables of the naive manager grow, shrink and are made writable (see `naive_manager`)."""

from kv_core.spans import ceil_div
from kv_testing.naive_publishing import NaivePublishing
from kv_testing.naive_window import Entry


class NaiveGrowing(NaivePublishing):
    """Growing and rewinding."""

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
