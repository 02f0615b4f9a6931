"""How the naive manager admits a request: what it finds, what it takes (see `naive_manager`)."""

from typing import Any

from kv_core.spans import ceil_div
from kv_testing.naive_state import NaiveSequence, NaiveState
from kv_testing.naive_window import Entry, NaiveTable, Node


class NaiveAdmitting(NaiveState):
    """Admitting."""

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
        found = self.found(sequence, limit)
        while True:
            length = self.agreed(found, limit)
            plans = [
                self.plan(window, sequence, match, length) for window, match in zip(self.windows, found, strict=True)
            ]
            inside = length % self.config.tokens_per_block
            if not inside or all(plan["needed"] <= plan["available"] for plan in plans):
                return length, plans
            limit = length - inside

    def found(self, sequence, limit) -> list[Any]:
        pairs = zip(self.windows, sequence.tables, strict=True)
        return [window.match(sequence, table, limit) for window, table in pairs]

    def agreed(self, found, length):
        """The longest length of at most so many tokens that all windows can serve."""
        while True:
            shorter = min(
                window.longest(path, source, length) for window, (path, source) in zip(self.windows, found, strict=True)
            )
            if shorter == length:
                return length
            length = shorter

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
            window.hit_tokens[node.block.tier] += window.T
            window.hold(node.block)
            node.block.owners += 1
            self.keep(node.block, sequence.wish(node.ordinal, window.T, self.config.reuse))
        lower = [node.block for node in path if node.block.tier > 0]
        own = None
        if wanted is not None:
            window.hit_tokens[wanted.block.tier] += plan["inside"]
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
