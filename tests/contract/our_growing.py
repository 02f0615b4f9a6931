"""Our manager grows and shrinks sequences (D1, D7, D29, D32).

In:  steps that decode and rewind.
Out: tables.
Law: see `our_model`.
"""

from contract.our_publishing import Publishing
from contract.our_window import OurWindow, held, strongest_wishes
from contract.seed_model import Block, NoFreeBlock
from contract.seed_sequence import Answer, SeedSequence, Step, decode_wish
from kv_core.spans import ceil_div


class Growing(Publishing):
    """Decoding and rewinding."""

    def _grow(self, one: SeedSequence) -> None:
        one.num_tokens += 1
        for number, window in enumerate(self.ours):
            table = self.tables[one.request_id][number]
            stop = front = self._front(table)
            while window.is_sliding and one.num_tokens - stop * self.size >= window.window + self.size:
                stop += 1
            if stop > front:
                if one.beam_width > 1:
                    raise NoFreeBlock
                self._detach(window, one, number, stop)
            if (one.num_tokens - 1) % self.size == 0:
                for beam, block in zip(table, window.take_many([decode_wish(one)] * len(table)), strict=True):
                    beam.append(block)

    def _detach(self, window: OurWindow, one: SeedSequence, number: int, stop: int) -> None:
        """A sliding window stores what it is about to let go of, then drops it, the first first (D1, D25, D32)."""
        self.causes.update(["core-D25"] if len(self.windows) > 1 else [])
        filled = min(len(one.tokens), stop * self.size)
        if self.config["enable_block_reuse"] and stop > self.published[one.request_id][number]:
            self.causes.update(("core-D1", "core-D32"))
            if one.content is not None and not one.content.get("is_dummy"):
                self._enter(window, one, number, one.keys(filled, self.size, False))
        table = self.tables[one.request_id][number][0]
        for at in range(self._front([table]), stop):
            window.let_go(held(table[at]))
            table[at] = None

    def op_rewind_kv_cache(self, step: Step) -> Answer:
        one = self._one(step)
        length = one.num_tokens - step["num_tokens"]
        pairs = list(zip(self.ours, range(len(self.ours)), strict=True))
        for window, number in pairs:
            needed = max(0, length - window.window) // self.size
            if window.is_sliding and self._front(self.tables[one.request_id][number]) > needed:
                self.causes.add("core-D7")  # it would read again what it let go of
                raise NoFreeBlock
            if window.window % self.size:
                self.causes.add("core-D29")
        copies = [self._needs_copy(window, one, number, length) for window, number in pairs]
        if any(needs and not window.num_free() for needs, (window, _) in zip(copies, pairs, strict=True)):
            self.causes.add("core-D7")
            raise NoFreeBlock
        for needs, (window, number) in zip(copies, pairs, strict=True):
            self._shrink(window, one, number, length, needs)
        one.num_tokens = length
        del one.tokens[length:]
        return self._table(one)

    def _needs_copy(self, window: OurWindow, one: SeedSequence, number: int, length: int) -> bool:
        """Whether the block in which the sequence ends is published, and others read it or follow it in the tree."""
        ordinal, inside = divmod(length, self.size)
        published = self.published[one.request_id][number]
        if not inside or ordinal >= published:
            return False
        block = self.tables[one.request_id][number][0][published - 1]
        if published > ordinal + 1 or block is None:
            return True
        return block.refs > 1 or bool(block.children) or self._is_depended_on(window, block)

    def _shrink(self, window: OurWindow, one: SeedSequence, number: int, length: int, needs_copy: bool) -> None:
        table, (ordinal, inside) = self.tables[one.request_id][number][0], divmod(length, self.size)
        stop, published = ceil_div(length, self.size), self.published[one.request_id][number]
        partial = table[published] if published < len(table) else None
        partial = partial if partial is not None and partial.in_tree else None
        while len(table) > max(stop, published + (partial is not None)):
            self.causes.add("core-D33")  # who takes the block takes nothing away from the sequence
            window.let_go(held(table.pop()), to_front=True)
        if partial is not None and partial.key is not None:
            if stop <= published:
                self.causes.add("core-D7")
                window.let_go(held(table.pop()))
            elif published * self.size + len(partial.key.tokens) > length:
                self._take_back(window, partial)
        for block in window.by_turn(table[stop:]):
            self.causes.add("core-D7")
            window.let_go(held(block))
        del table[stop:]
        published = min(published, stop)
        if inside and ordinal < published:
            published = ordinal
            block = held(table[ordinal])
            if needs_copy:
                self.causes.add("core-D7")
                wishes = strongest_wishes(one.retention, self.size, one.prompt_length)
                wish = wishes[ordinal] if ordinal < len(wishes) else decode_wish(one)
                [table[ordinal]] = window.take_many([wish])
                window.let_go(block)
            else:
                self._take_back(window, block)
        self.published[one.request_id][number] = published

    def _take_back(self, window: OurWindow, block: Block) -> None:
        """A published block that nobody else reads is the request's own again."""
        self.causes.add("core-D7")
        window.log.removed(window.window, block.name)
        window.prune(block)
        block.key = None
