"""Our manager publishes, releases, pins and unpins (D3, D16, D30, D47, D61).

In:  steps that store, remove, pin and unpin.
Out: the tree.
Law: see `our_model`.
"""

from typing import Any

from contract.our_admitting import Admitting
from contract.our_window import HOLE, OurWindow, held
from contract.seed_model import Block, Key, NoFreeBlock
from contract.seed_sequence import Answer, SeedSequence, Step
from kv_core.spans import ceil_div


class Stored:
    """Blocks that entered the tree one behind the other, told as one event."""

    def __init__(self, window: OurWindow) -> None:
        self._window = window
        self._parent_name: Any = None
        self._blocks: list[Block] = []

    def add(self, parent_name: Any, block: Block) -> None:
        if not self._blocks:
            self._parent_name = parent_name
        self._blocks.append(block)

    def tell(self) -> None:
        if self._blocks:
            self._window.log.stored(self._window.window, self._parent_name, self._blocks)
        self._blocks = []


class Publishing(Admitting):
    """Storing, releasing, pins."""

    def op_store_context_blocks(self, step: Step) -> Answer:
        one = self._one(step)
        self._publish(one, len(one.tokens) - 1, False)
        return self._table(one)

    op_store_new_block = op_store_context_blocks

    def op_store_blocks_for_reuse(self, step: Step) -> Answer:
        one = self._one(step)
        self._publish(one, len(one.tokens) - 1, True)
        num_stored = ceil_div(max(0, len(one.tokens) - 1), self.size)
        return {"pinned_block_ids": self._pin(one, num_stored) if step.get("pin_blocks") else []} | self._table(one)

    def _publish(self, one: SeedSequence, num_filled: int, partial: bool) -> None:
        if not self.config["enable_block_reuse"] or one.content is None or one.content.get("is_dummy"):
            return
        keys = one.keys(num_filled, self.size, partial)
        for number, window in enumerate(self.ours):
            table = self.tables[one.request_id][number]
            shared = sum(len({id(beam[at]) for beam in table}) == 1 for at in range(len(table[0])))
            if one.beam_width > 1 and keys:
                self.causes.add("core-D61")
            full = [key for key in keys if len(key.tokens) == self.size or one.beam_width == 1]
            self._enter(window, one, number, full[:shared])
            if window.is_sliding and keys:
                self.causes.add("core-D32")

    def _enter(self, window: OurWindow, one: SeedSequence, number: int, keys: list[Key]) -> None:
        name = one.request_id
        if (name, number) in self.stuck or not self._anything_new(one, number, keys):
            return
        if keys and len(keys[-1].tokens) < self.size and one.starts_item(len(keys) - 1, self.size):
            self.causes.add("core-D53")  # a block that is not full would be found by its tokens alone
            keys = keys[:-1]
        table, cursor, stored = self.tables[name][number], window.root, Stored(window)
        num_full = sum(len(key.tokens) == self.size for key in keys)
        for at, key in enumerate(keys):
            own, child = table[0][at], cursor.children.get(key)
            if own is not None and own.in_tree and own is not child:
                self.causes.add("core-D3")  # a partial block that has grown
                window.log.removed(window.window, own.name)
                window.prune(own)
            if own is None or child is None or child.block_id == HOLE:
                self._link(cursor, key, own, stored)
            elif child is not own and child.full:
                if own.refs > 1:
                    self.causes.add("core-D30")  # a pin holds the request's own block, so it cannot be exchanged
                    self.stuck.add((name, number))
                    num_full = at
                    break
                stored.tell()
                self._exchange(window, table, at, child)
            cursor = table[0][at] or cursor.children[key]
        self.published[name][number] = max(self.published[name][number], num_full)
        stored.tell()

    def _anything_new(self, one: SeedSequence, number: int, keys: list[Key]) -> bool:
        """What is published stays as it is, until it has grown."""
        num_full, published = sum(len(key.tokens) == self.size for key in keys), self.published[one.request_id][number]
        last = self.tables[one.request_id][number][0][num_full : num_full + 1]
        partial = last[0].key if last and last[0] is not None and last[0].in_tree and not last[0].full else None
        if num_full < published or (partial and len(partial.tokens) >= len(keys[-1].tokens if keys else ())):
            self.causes.add("core-D3")
            return False
        return True

    def _link(self, parent: Block, key: Key, own: Block | None, stored: Stored) -> None:
        """The block, or a hole where there is none any more, takes its place in the tree, or that of a hole."""
        child = parent.children.get(key)
        if own is None and child is not None:
            return
        node = own if own is not None else Block(HOLE, -1)
        node.key, node.full, node.prev = key, len(key.tokens) == self.size, parent
        node.name = (parent.name, key)
        node.children = child.children if child is not None else node.children
        for grand in node.children.values():
            grand.prev = node
        parent.children[key] = node
        if own is not None:
            stored.add(parent.name, node)
            node.used = self.now

    def _exchange(self, window: OurWindow, table: list[list[Block | None]], at: int, child: Block) -> None:
        """The tree has equal content: one of the two blocks goes (D30)."""
        own = held(table[0][at])
        if child.level > 0:
            window.raise_up(child, own)
            own.used = self.now
            return
        window.hold(child)
        child.used = self.now
        window.discard(own)
        for beam in table:
            beam[at] = child

    def op_remove_sequence(self, step: Step) -> None:
        one = self._one(step)
        override = step.get("request_tokens_override")
        filled = len(one.tokens if override is None else override) - 1
        if step.get("with_request", True):
            self._publish(one, filled, True)
        for number, (window, table) in enumerate(zip(self.ours, self.tables.pop(one.request_id), strict=True)):
            # A sliding window gives up first what no match reads that ends within its last stretch, and of what is
            # left the first block first: nothing depends on it (D32).
            num_spare = (self.published[one.request_id][number] * self.size - 2 * window.window) // self.size
            for at in window.by_turn(list(range(len(table[0])))):
                for block in window.by_turn(list(dict.fromkeys(beam[at] for beam in table))):
                    if block is not None:
                        window.let_go(block, spare=at < num_spare)

    def op_pin_blocks(self, step: Step) -> None:
        self._pin(self._one(step), 1 << 31)

    def _pin(self, one: SeedSequence, num_blocks: int) -> list[int]:
        """One pin, however many beams list a block, of live blocks only (D16); told is the last window (D47)."""
        if one.beam_width > 1:
            self.causes.add("core-D47")
        blocks: list[Block] = []
        for number, table in enumerate(self.tables[one.request_id]):
            if not all(block is not None and block.in_tree for block in table[0][:num_blocks]):
                self.causes.add("core-D16")  # what was let go of is not pinned, nor what the tree has elsewhere
            entries = (beam[at] for at in range(min(num_blocks, len(table[0]))) for beam in table)
            blocks = [block for block in dict.fromkeys(entries) if block is not None]
            for block in blocks:
                block.refs += 1
                block.used = self.now
            if number == 0:
                self.pins.append((list(blocks), set()))
        return [block.block_id for block in blocks]

    def op_unpin_blocks_by_id(self, step: Step) -> None:
        """In the first window, by the oldest pin that has the block; from its end, if the window is not sliding."""
        touched: list[int] = []
        for number in step["block_ids"]:
            left = (
                (at, block)
                for at, (blocks, given) in enumerate(self.pins)
                for block in blocks
                if block.block_id == number and block not in given
            )
            at, block = next(left, (None, None))
            if at is None or block is None:
                self.causes.add("core-D47")
                raise NoFreeBlock
            self.pins[at][1].add(block)
            touched += [] if at in touched else [at]
        freed = [block for at in touched for block in self._give_up(*self.pins[at])]
        if [block.block_id for block in freed] != step["block_ids"]:
            self.causes.add("core-D47")

    def _give_up(self, blocks: list[Block], given: set[Block]) -> list[Block]:
        freed = []
        for block in self.ours[0].by_turn(list(blocks)):
            if block not in given:
                if not self.ours[0].is_sliding:
                    break
                continue
            blocks.remove(block)
            given.remove(block)
            self.ours[0].let_go(block)
            freed.append(block)
        return freed
