"""Our block manager as lists and dicts, for rules that need to know what we do instead of the seed.

In:  the same steps as the seed's model.
Out: the same fields, with the documented defects fixed; `causes`, the defects whose fix has made a difference so far.
Law: block by block and obviously so; nothing of kv_core's manager is used. A rule compares its answer with what kv_core
     returned, so a mistake in here, or in kv_core, can only make a case fail.

Blocks are the nodes of the tree. A hole is a node without a block, in a sliding window.
"""

from collections.abc import Iterable
from typing import Any

from contract.seed_manager import Answer, SeedManager, SeedSequence, Step, decode_wish, wishes_of
from contract.seed_model import DEFAULT_PRIORITY, Block, Key, NoFreeBlock, SeedWindow
from kv_core.spans import ceil_div

Wish = tuple[int | None, int | None]
HOLE = -2


class OurWindow(SeedWindow):
    """One window: the seed's lists, our choices."""

    causes: set[str]
    depended_on: set[int]

    def victim(self, level: int) -> Block:
        """The lowest priority, then the first, among blocks on whose place nothing of the level depends (D37)."""
        found = [block for block in self.queue if block.level == level]
        if not found:
            raise NoFreeBlock
        free = [block for block in found if self.is_sliding or not self.kin(block)]
        chosen = min(free, key=lambda block: (block.priority, self.is_sliding and block.in_tree and not block.spare))
        if chosen is not min(found, key=lambda block: block.priority):
            self.causes.add("core-D32" if self.is_sliding else "core-D37")
        return chosen

    def kin(self, block: Block) -> bool:
        return any(child.level == block.level for child in block.children.values())

    def hold(self, block: Block, wish: Wish = (None, None)) -> None:
        """One more holder; a wish replaces what nobody else holds to, else the stronger one stays (D38)."""
        if block in self.queue:
            self.queue.remove(block)
        block.expires = None
        block.spare = False
        block.refs += 1
        if wish[0] is not None:
            others = block.refs > 1
            strongest = max(wish, (block.priority, block.duration), key=_strength) if others else wish
            if others and strongest != wish:
                self.causes.add("core-D38")
            if strongest[0] != block.priority and block.in_tree and strongest[0] is not None:
                self.log.priority(self.window, block.name, block.priority, strongest[0])
            block.priority, block.duration = strongest[0] or 0, strongest[1]

    def let_go(self, block: Block, to_front: bool = False, spare: bool = False) -> None:
        block.refs -= 1
        if not block.refs:
            block.spare = spare
            self.release(block, to_front)

    def discard(self, block: Block) -> None:
        """A copy of what the tree has elsewhere goes before all others (D30)."""
        self.causes.add("core-D30")
        block.refs, block.priority, block.duration, block.key = 0, 0, None, None
        self.release(block, to_front=True)

    def raise_up(self, lower: Block, own: Block) -> None:
        """The tree takes over a request's block in place of one on a lower level (D30)."""
        own.key, own.full, own.name, own.prev, own.children = (
            lower.key,
            lower.full,
            lower.name,
            lower.prev,
            lower.children,
        )
        own.priority, own.duration = lower.priority, lower.duration
        for child in own.children.values():
            child.prev = own
        assert own.prev is not None
        assert own.key is not None
        own.prev.children[own.key] = own
        lower.prev, lower.children = None, {}
        self.queue.remove(lower)
        lower.expires = None
        self.discard(lower)
        self.log.level(self.window, own.name, 1, 0)

    # Taking blocks.

    def take_many(self, wishes: list[Wish]) -> list[Block]:
        """Victims for a whole request at once (D63)."""
        taken = self.make_room(0, len(wishes), 0)
        for block, (priority, duration) in zip(taken, wishes, strict=True):
            block.priority = DEFAULT_PRIORITY if priority is None else priority
            block.duration, block.expires, block.refs, block.key, block.full = duration, None, 1, None, False
            block.owner = 0
        self.counts["alloc_total_blocks"] += len(taken)
        return taken

    def make_room(self, level: int, count: int, count_later: int) -> list[Block]:
        """Free blocks of a level; what can move down and stay there moves, the rest is dropped."""
        chosen = []
        for _ in range(count):
            block = self.victim(level)
            self.queue.remove(block)
            chosen.append(block)
            self.counts["alloc_new_blocks"] += level == 0 and not block.in_tree
            if level == 0 and not block.in_tree and block.owner is not None:
                # It holds nothing any more: counted as new, and not worth a move.
                self.causes.update({"core-D37 counts", *(["core-D37"] if self.num_lower else [])})
            block.level += 10  # on the way: nothing counts it
        movable = [self.can_move(block, level, chosen) for block in chosen]
        room = []
        for at, block in enumerate(chosen):
            if movable[at] and self.num_free(level + 1) - sum(movable[at + 1 :]) - count_later > 0:
                room.append(self.move_down(block, level))
            else:
                if movable[at]:
                    self.causes.add("core-D63")
                block.level = level
                self.drop_content(block)
                room.append(block)
        return room

    def can_move(self, block: Block, level: int, chosen: list[Block]) -> bool:
        """It is wanted, or what stays below depends on it."""
        if not block.in_tree or level > 0 or not self.num_lower or not self.config["onboard_blocks"]:
            return False
        return block.priority >= self.threshold or any(child not in chosen for child in block.children.values())

    @property
    def num_lower(self) -> int:
        return int(self.config["blocks_per_window"][str(self.window)][1])

    def move_down(self, block: Block, level: int) -> Block:
        self.log.level(self.window, block.name, level, level + 1)
        (lower,) = self.make_room(level + 1, 1, 0)
        block.level, lower.level = level + 1, level
        if block.duration is not None:
            self.causes.add("core-D38")
        expires = block.expires
        self.queue.append(block)
        block.expires = expires
        return lower

    def drop_content(self, block: Block) -> None:
        """The block leaves the tree; what depends on it goes too, or a hole stays."""
        if not block.in_tree:
            return
        if self.is_sliding and block.children:
            self.leave_hole(block)
        else:
            for child in list(block.children.values()):
                self.drop_below(child)
        self.log.removed(self.window, block.name)
        self.prune(block)

    def drop_below(self, block: Block) -> None:
        for child in list(block.children.values()):
            self.drop_below(child)
        self.log.removed(self.window, block.name)
        self.unlink(block)
        self.queue.remove(block)
        block.priority, block.duration, block.expires = 0, None, None
        self.queue.insert(0, block)

    def leave_hole(self, block: Block) -> None:
        assert block.prev is not None
        assert block.key is not None
        hole = Block(HOLE, -1, block.key, True, block.prev, block.children, name=block.name)
        for child in hole.children.values():
            child.prev = hole
        block.children = {}
        block.prev.children[block.key] = hole
        self.log.removed(self.window, block.name)
        block.prev = None

    def prune(self, block: Block) -> None:
        """Unlink, and holes that only led to it."""
        parent = block.prev
        self.unlink(block)
        while parent is not None and parent.block_id == HOLE and not parent.children:
            gone, parent = parent, parent.prev
            self.unlink(gone)

    def bring(self, blocks: list[Block], num_wanted: int) -> None:
        """Onboard blocks that are held already (D36); the places they leave go first on their level."""
        if not blocks:
            return
        self.causes.update(("core-D36", "core-D55"))
        fresh = self.counts["alloc_new_blocks"]
        carriers = self.make_room(0, len(blocks), max(0, num_wanted - len(blocks)))
        self.counts["alloc_new_blocks"] = fresh
        for block, carrier in zip(blocks, carriers, strict=True):
            block.level, carrier.level = 0, 1
            if block.in_tree:
                self.log.level(self.window, block.name, 1, 0)
        for carrier in reversed(carriers):
            carrier.priority, carrier.duration, carrier.key = 0, None, None
            self.queue.insert(0, carrier)

    # Matching.

    def walk(self, keys: list[Key], limit: int) -> list[Block]:
        """Whole blocks of the first `limit` tokens, holes included."""
        nodes, cursor = [], self.root
        for at, key in enumerate(keys):
            if (at + 1) * self.size > limit or key not in cursor.children:
                break
            cursor = cursor.children[key]
            nodes.append(cursor)
        return nodes

    def source(self, parent: Block, key: Key, beams: int) -> tuple[int, Block | None]:
        """The child that holds most of `key`'s tokens, and how many (D34, D40, D41, D53)."""
        config = self.config
        if not config["enable_partial_reuse"] or not (config["copy_on_partial_reuse"] or beams == 1):
            if key in parent.children:
                self.causes.add("core-D40")
            return 0, None
        best: tuple[tuple[int, int, int, int], Block | None] = ((0, 0, 0, 0), None)
        for block in parent.children.values():
            if block.block_id != HOLE and (
                config["copy_on_partial_reuse"] or (not block.refs and id(block) not in self.depended_on)
            ):
                assert block.key is not None
                count = common(block.key, key)
                rank = (count, -block.level, block.used, -block.block_id)
                best = (rank, block) if count and rank > best[0] else best
        if sum(common(block.key, key) == best[0][0] for block in parent.children.values() if best[1]) > 1:
            self.causes.add("core-D41")  # of blocks that hold as many, the seed takes any
        return best[0][0], best[1]


class OurManager(SeedManager):
    """All windows, ascending."""

    window_class = OurWindow

    def __init__(self, config: dict[str, Any]) -> None:
        self.causes: set[str] = set()
        super().__init__(config)
        for window in self.windows:
            window.causes = self.causes  # type: ignore[attr-defined]
        self.tables: dict[int, list[list[list[Block | None]]]] = {}
        self.published: dict[int, list[int]] = {}
        self.now = 0

    @property
    def ours(self) -> list[OurWindow]:
        return self.windows  # type: ignore[return-value]

    # Adding: match everywhere, agree, claim, then take (D4, D5, D36).

    def op_add_sequence(self, step: Step) -> Answer:
        one = self.requests.get(step["request_id"]) if step.get("use_existing_request") else None
        one = one or self._new(step, step.get("request"))
        items = (one.content or {}).get("multimodal") or {}
        if len({len(items.get(name) or []) for name in ("hashes", "positions", "lengths")}) > 1:
            self.causes.add("core-D13")
            raise NoFreeBlock
        self.requests[step["request_id"]] = one
        one.num_tokens, length = step["input_length"], step["input_length"]
        reuses = self.config["enable_block_reuse"] and one.content is not None
        limit = length - 1 if reuses else 0
        keys = one.keys(length // self.size * self.size, self.size, False) if reuses else []
        while True:
            plans = self._plans(one, keys, limit, length)
            tail = plans[0]["length"] % self.size
            if all(plan["fits"] for plan in plans):
                break
            if not tail:
                raise NoFreeBlock
            self.causes.add("core-D5")
            limit = plans[0]["length"] - tail
        before = self._counts()
        self.now += 1
        self.tables[one.request_id] = []
        for window, plan in zip(self.ours, plans, strict=True):
            self._carry_out(window, one, plan, length)
        self.published[one.request_id] = [plan["length"] // self.size for plan in plans]
        after = self._counts()
        one.stats = {name: after[name] - before[name] for name in after}
        extra = (self.config.get("connector_matched_tokens") or 0) if reuses else 0
        extra = 0 if (one.content or {}).get("is_dummy") else min(extra, length - 1 - plans[0]["length"])
        one.prepopulated = plans[0]["length"] + extra
        rate = one.stats["reused_blocks"] / max(1, one.stats["reused_blocks"] + one.stats["missed_blocks"])
        answer = {"prepopulated": one.prepopulated, "stats": one.stats, "kv_cache_hit_rate": rate}
        return answer | self._table(one)

    def _plans(self, one: SeedSequence, keys: list[Key], limit: int, length: int) -> list[dict[str, Any]]:
        found = []
        for window in self.ours:
            nodes = window.walk(keys, limit)
            at = len(nodes) * self.size
            rest = one.tokens[at : min(at + self.size, limit)]
            count, source = (0, None)
            if rest:
                parent = nodes[-1] if nodes else window.root
                window.depended_on = {
                    id(block) for block in parent.children.values() if self._is_depended_on(window, block)
                }
                count, source = window.source(parent, one.key(rest, at), one.beam_width)
            found.append((nodes, count, source))
        agreed = limit
        while True:
            shorter = min(self._longest(*pair, agreed) for pair in zip(self.ours, found, strict=True))
            if shorter == agreed:
                break
            agreed = shorter
        return [self._plan(window, one, match, agreed, length) for window, match in zip(self.ours, found, strict=True)]

    def _is_depended_on(self, window: OurWindow, block: Block) -> bool:
        """Whether blocks follow it in the tree, or a request goes on behind it that has let go of it."""
        if block.children or not window.is_sliding:
            return bool(block.children)
        number = self.ours.index(window)
        for name, tables in self.tables.items():
            published, keys = self.published[name][number], self.requests[name].keys
            front = self._front(tables[number])
            if published and front >= published:
                usable = len(self.requests[name].tokens) // self.size * self.size
                nodes = window.walk(keys(usable, self.size, False)[:published], published * self.size)
                if nodes and nodes[-1] is block:
                    return True
        return False

    def _longest(self, window: OurWindow, match: tuple[list[Block], int, Block | None], limit: int) -> int:
        nodes, count, _ = match
        length = min(limit, len(nodes) * self.size + count)
        if length < len(nodes) * self.size and length % self.size and not self.config["enable_partial_reuse"]:
            length -= length % self.size
        if length < limit and limit < len(nodes) * self.size + count:
            self.causes.add("core-D34")
        while window.is_sliding and length:
            first = max(0, length - window.window + 1) // self.size
            holes = [
                at for at in range(first, min(len(nodes), ceil_div(length, self.size))) if nodes[at].block_id == HOLE
            ]
            if not holes:
                break
            self.causes.update(("core-D1", "core-D32"))
            length = holes[-1] * self.size
        return length

    def _plan(
        self,
        window: OurWindow,
        one: SeedSequence,
        match: tuple[list[Block], int, Block | None],
        agreed: int,
        length: int,
    ) -> dict[str, Any]:
        nodes, _, source = match
        whole, tail = divmod(agreed, self.size)
        start = max(0, agreed - window.window + 1) // self.size if window.is_sliding else 0
        source = None if not tail else source if whole == len(nodes) else nodes[whole]
        path = nodes[start:whole]
        positions = ceil_div(length, self.size)
        empty = self._places(window, one, whole, positions)
        available = window.num_free() - sum(block in window.queue and block.level == 0 for block in path)
        lower = [block for block in path if block.level]
        onboarded = len(lower)
        takes_over = False
        if source is not None:
            leaf = not source.refs and one.beam_width == 1 and not self._is_depended_on(window, source)
            primary_free = not source.refs and source.level == 0
            must = not source.full or not self.config["copy_on_partial_reuse"]
            takes_over = leaf and (must or len(empty) + onboarded > available - primary_free)
            available -= primary_free
            onboarded += takes_over and source.level > 0
        needed = len(empty) - takes_over + onboarded
        return {
            "length": agreed,
            "start": start,
            "path": path,
            "source": source,
            "takes_over": takes_over,
            "empty": empty[1:] if takes_over else empty,
            "fits": needed <= available,
            "missed": positions - whole - (source is not None),
            "whole": whole,
        }

    def _places(self, window: OurWindow, one: SeedSequence, start: int, stop: int) -> list[tuple[int, tuple[int, ...]]]:
        """Which block goes to which ordinal of which beams."""
        length, every = one.num_tokens, tuple(range(one.beam_width))
        shared = stop
        if one.beam_width > 1 and self.config["cache_type"] != "cross":
            ends = length % self.size == 0 and not self.config["enable_block_reuse"]
            shared = stop if ends else stop - 1
        places: list[tuple[int, tuple[int, ...]]] = []
        for at in range(start, stop):
            places += [(at, every)] if at < shared else [(at, (beam,)) for beam in every]
        return places

    def _carry_out(self, window: OurWindow, one: SeedSequence, plan: dict[str, Any], length: int) -> None:
        wishes = strongest_wishes(one.retention, self.size, length)
        if wishes != wishes_of(one.retention, self.size, length):
            self.causes.add("core-D45")
        table: list[list[Block | None]] = [[None] * plan["start"] for _ in range(one.beam_width)]
        for at, block in enumerate(plan["path"], plan["start"]):
            window.hold(block, wishes[at])
            block.used = self.now
            for beam in table:
                beam.append(block)
        if plan["takes_over"]:
            self._take_over(window, plan["source"], wishes[plan["whole"]])
            table[0].append(plan["source"])
        plain = one.content is None or not self.config["enable_block_reuse"]
        taken = self._take(window, plan, [decode_wish(one) if plain else wishes[at] for at, _ in plan["empty"]])
        self._note_copy(one, plan, wishes)
        for (at, beams), block in zip(plan["empty"], taken, strict=True):
            for beam in beams:
                assert len(table[beam]) == at
                table[beam].append(block)
        self.tables[one.request_id].append(table)
        window.counts["reused_blocks"] += plan["whole"] + (plan["source"] is not None)
        window.counts["missed_blocks"] += 0 if plain else plan["missed"]

    def _take_over(self, window: OurWindow, source: Block, wish: Wish) -> None:
        """The block leaves the tree, and readers of events hear of it (D35, D52)."""
        self.causes.update(("core-D35", "core-D52"))
        window.log.removed(window.window, source.name)
        window.prune(source)
        window.hold(source)
        if wish[0] is not None:
            source.priority, source.duration = _default(wish)
        source.key = None

    def _take(self, window: OurWindow, plan: dict[str, Any], wanted: list[Wish]) -> list[Block]:
        """Bring what lies lower, then take; the source of a copy stays out of reach (D5)."""
        source, lower = plan["source"], [block for block in plan["path"] if block.level]
        if plan["takes_over"]:
            lower += [source] if source.level else []
        if source is None or plan["takes_over"] or source not in window.queue:
            window.bring(lower, len(wanted))
            return window.take_many(wanted)
        before = window.queue[: window.queue.index(source)]
        level = [block for block in window.queue if block.level == 0]
        if source in sorted(level, key=lambda block: block.priority)[: len(wanted) + len(lower)]:
            self.causes.add("core-D5")
        window.queue.remove(source)
        window.bring(lower, len(wanted))
        taken = window.take_many(wanted)
        window.queue.insert(sum(block in window.queue for block in before), source)
        return taken

    def _note_copy(self, one: SeedSequence, plan: dict[str, Any], wishes: list[Wish]) -> None:
        source = plan["source"]
        if source is None or plan["takes_over"] or source.key is None:
            return
        if _default(wishes[plan["whole"]]) != (source.priority, source.duration):
            self.causes.add("core-D39")
        if source.full and not source.refs and not source.children:
            self.causes.add("core-D35")
        if source.key.items != one.key(list(source.key.tokens), plan["whole"] * self.size).items:
            self.causes.add("core-D53")

    # Growing and shrinking.

    def _grow(self, one: SeedSequence) -> None:
        one.num_tokens += 1
        for number, window in enumerate(self.ours):
            table = self.tables[one.request_id][number]
            while window.is_sliding and one.num_tokens - self._front(table) * self.size >= window.window + self.size:
                if one.beam_width > 1:
                    raise NoFreeBlock
                self._detach(window, one, number, self._front(table))
            if (one.num_tokens - 1) % self.size == 0:
                for beam, block in zip(table, window.take_many([decode_wish(one)] * len(table)), strict=True):
                    beam.append(block)

    def _detach(self, window: OurWindow, one: SeedSequence, number: int, front: int) -> None:
        """A sliding window stores what it is about to let go of, then drops it (D1, D32)."""
        filled = min(len(one.tokens), (front + 1) * self.size)
        if self.config["enable_block_reuse"] and front >= self.published[one.request_id][number]:
            self.causes.update(("core-D1", "core-D32"))
            if one.content is not None and not one.content.get("is_dummy"):
                self._enter(window, one, number, one.keys(filled, self.size, False))
        block = self.tables[one.request_id][number][0][front]
        assert block is not None
        window.let_go(block)
        self.tables[one.request_id][number][0][front] = None

    def _front(self, table: list[list[Block | None]]) -> int:
        return next(at for at, block in enumerate(table[0]) if block is not None)

    def op_rewind_kv_cache(self, step: Step) -> Answer:
        one = self._one(step)
        one.num_tokens -= step["num_tokens"]
        del one.tokens[one.num_tokens :]
        for window, table in zip(self.ours, self.tables[one.request_id], strict=True):
            while len(table[0]) > ceil_div(one.num_tokens, self.size):
                block = table[0].pop()
                assert block is not None
                window.let_go(block, to_front=True)
        return self._table(one)

    # Publishing and releasing.

    def op_store_context_blocks(self, step: Step) -> Answer:
        one = self._one(step)
        self._publish(one, len(one.tokens) - 1, False)
        return self._table(one)

    op_store_new_block = op_store_context_blocks

    def op_store_blocks_for_reuse(self, step: Step) -> Answer:
        one = self._one(step)
        self._publish(one, len(one.tokens) - 1, True)
        return {"pinned_block_ids": self._pin(one) if step.get("pin_blocks") else []} | self._table(one)

    def _publish(self, one: SeedSequence, num_filled: int, partial: bool) -> None:
        if not self.config["enable_block_reuse"] or one.content is None or one.content.get("is_dummy"):
            return
        keys = one.keys(num_filled, self.size, partial)
        for number, window in enumerate(self.ours):
            table = self.tables[one.request_id][number]
            shared = sum(len({id(beam[at]) for beam in table}) == 1 for at in range(len(table[0])))
            if one.beam_width > 1 and keys and shared:
                self.causes.add("core-D61")
            full = [key for key in keys if len(key.tokens) == self.size or one.beam_width == 1]
            self._enter(window, one, number, full[:shared])
            if window.is_sliding and keys:
                self.causes.add("core-D32")

    def _enter(self, window: OurWindow, one: SeedSequence, number: int, keys: list[Key]) -> None:
        table, cursor = self.tables[one.request_id][number], window.root
        stored: list[Block] = []
        parent_name = None
        for at, key in enumerate(keys):
            own, child = table[0][at], cursor.children.get(key)
            if own is not None and own.in_tree and own is not child and own.prev is not None:
                window.log.removed(window.window, own.name)  # a partial block that has grown
                window.prune(own)
            if child is not None and child is not own and own is not None and child.level > 0 and child.full:
                window.raise_up(child, own)
                child = own
            elif child is not None and child is not own and own is not None and child.block_id != HOLE and child.full:
                window.hold(child)
                window.discard(own)
                for beam in table:
                    beam[at] = child
            elif child is None or (child.block_id == HOLE and own is not None):
                node = own if own is not None else Block(HOLE, -1)
                node.key, node.full, node.prev = key, len(key.tokens) == self.size, cursor
                node.name = (cursor.name, key)
                node.children = child.children if child is not None else node.children
                for grand in node.children.values():
                    grand.prev = node
                cursor.children[key] = node
                if own is not None:
                    parent_name = cursor.name if not stored else parent_name
                    stored.append(node)
                    node.used = self.now
                child = node
            cursor = table[0][at] or child or cursor
        self.published[one.request_id][number] = max(
            self.published[one.request_id][number], sum(len(key.tokens) == self.size for key in keys)
        )
        if stored:
            window.log.stored(window.window, parent_name, stored)

    def op_remove_sequence(self, step: Step) -> None:
        one = self._one(step)
        override = step.get("request_tokens_override")
        filled = len(one.tokens if override is None else override) - 1
        if step.get("with_request", True):
            self._publish(one, filled, True)
        for number, (window, table) in enumerate(zip(self.ours, self.tables.pop(one.request_id), strict=True)):
            # A sliding window gives up first what no match reads that ends within its last stretch (D32).
            num_spare = (self.published[one.request_id][number] * self.size - 2 * window.window) // self.size
            for at in range(len(table[0]) - 1, -1, -1):
                for block in dict.fromkeys(reversed([beam[at] for beam in table])):
                    if block is not None:
                        window.let_go(block, spare=at < num_spare)

    def op_pin_blocks(self, step: Step) -> None:
        self._pin(self._one(step))

    def _pin(self, one: SeedSequence) -> list[int]:
        pinned = []
        for table in self.tables[one.request_id]:
            blocks = dict.fromkeys(block for beam in table for block in beam if block is not None)
            pinned = [block.block_id for block in blocks]
            for block in blocks:
                block.refs += 1
        return pinned

    def op_unpin_blocks_by_id(self, step: Step) -> None:
        for number in step["block_ids"]:
            if not 0 <= number < len(self.ours[0].blocks) or not self.ours[0].blocks[number].refs:
                raise NoFreeBlock
        for number in reversed(step["block_ids"]):
            self.ours[0].let_go(self.ours[0].blocks[number])

    def op_offload_block(self, step: Step) -> Answer:
        if self._block(step)[1].refs:
            self.causes.add("core-D6")  # what a request holds stays where it reads it
        return self.op_inspect_block(step)

    def op_onboard_block(self, step: Step) -> Answer:
        return self.op_inspect_block(step)

    def op_inspect_block(self, step: Step) -> Answer:
        answer = super().op_inspect_block(step)
        parent = self._block(step)[1].prev
        return answer | ({"prev_block_id": None} if parent is not None and parent.block_id == HOLE else {})

    def op_get_last_block_id(self, step: Step) -> Answer:
        block = self.tables[step["request_id"]][0][0][-1]
        return {"block_id": None if block is None else block.block_id}

    def op_find_blocks_in_reuse_tree(self, step: Step) -> Answer:
        """Whole blocks exactly, only the last one in part (D9)."""
        window = self._window(step)
        one = self._new({"request_id": -1}, step)
        keys = one.keys(len(one.tokens), self.size, True)
        cursor, chain = window.root, []
        for at, key in enumerate(keys):
            found: Block | None = cursor.children.get(key)
            if found is None and at == len(keys) - 1:
                found = max(cursor.children.values(), key=lambda block: common(block.key, key), default=None)
                found = found if found is not None and common(found.key, key) else None
            if found is None:
                return {"found": False, "chain_block_ids": []}
            chain.append(found.block_id)
            cursor = found
        return {"found": True, "chain_block_ids": chain}

    def _table(self, one: SeedSequence) -> Answer:
        return {"block_ids": None} if one.request_id not in self.tables else {"block_ids": self._listed(one)}

    def _listed(self, one: SeedSequence) -> Any:
        tables = {}
        for window, table in zip(self.windows, self.tables[one.request_id], strict=True):
            beams = []
            for number, beam in enumerate(table):
                before = self.listed.setdefault((one.request_id, window.window, number), [])
                now = [before[at] if block is None and at < len(before) else None if block is None else block.block_id
                       for at, block in enumerate(beam)]  # fmt: skip
                self.listed[one.request_id, window.window, number] = now
                beams.append(list(now))
            tables[str(window.window)] = beams[0] if one.beam_width == 1 else beams
        return tables if len(tables) > 1 else next(iter(tables.values()))

    def op_is_sequence_valid_for_store_for_reuse(self, step: Step) -> Answer:
        valid = {
            str(window.window): all(block is not None for block in table[0])
            for window, table in zip(self.windows, self.tables[step["request_id"]], strict=True)
        }
        only = valid[str(self._window(step).window)] if "window" in step or len(valid) == 1 else valid
        return {"value": only, "valid": only}


def common(one: Key | None, two: Key | None) -> int:
    """Leading tokens with equal cache: behind an item in which they differ nothing is (D53)."""
    if one is None or two is None or (one.uses_extra, one.lora, one.salt) != (two.uses_extra, two.lora, two.salt):
        return 0
    count = 0
    for mine, theirs in zip(one.tokens, two.tokens, strict=False):
        if mine != theirs:
            break
        count += 1
    if one.items != two.items:
        starts = [
            item[2] for key in (one, two) for item in key.items if item not in (one.items if key is two else two.items)
        ]
        count = min([count, *starts])
    return count


def strongest_wishes(retention: dict[str, Any], size: int, length: int) -> list[Wish]:
    """The strongest wish among the ranges that overlap a block (D45)."""
    wishes: list[Wish] = []
    for first in range(0, length, size):
        last = min(first + size, length)
        found: Iterable[Wish] = (
            (one.get("priority", 35), one.get("duration_ms"))
            for one in retention.get("ranges", [])
            if one["start"] < last and (one.get("end") is None or first < one["end"])
        )
        wishes.append(max(found, key=_strength, default=(None, None)))
    return wishes


def _strength(wish: Wish) -> tuple[int, float]:
    return (-1 if wish[0] is None else wish[0]), (float("inf") if wish[1] is None else wish[1])


def _default(wish: Wish) -> tuple[int, int | None]:
    return (DEFAULT_PRIORITY if wish[0] is None else wish[0]), wish[1]
