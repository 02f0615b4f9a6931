"""Our manager admits requests: match everywhere, agree, claim, then take (D4, D5, D36).

In:  steps that add sequences.
Out: plans, tables, causes.
Law: see `our_model`.
"""

from typing import Any

from contract.our_window import ASIDE, HOLE, OurWindow, Wish, or_default, strongest_wishes
from contract.seed_manager import SeedManager
from contract.seed_model import Block, Key, NoFreeBlock
from contract.seed_sequence import Answer, SeedSequence, Step, decode_wish, wishes_of
from kv_core.spans import ceil_div


class Admitting(SeedManager):
    """All windows, ascending."""

    window_class = OurWindow

    def __init__(self, config: dict[str, Any]) -> None:
        self.causes: set[str] = set()
        super().__init__(config)
        for window in self.windows:
            window.causes = self.causes  # type: ignore[attr-defined]
        self.tables: dict[int, list[list[list[Block | None]]]] = {}
        self.published: dict[int, list[int]] = {}
        self.pins: list[tuple[list[Block], set[Block]]] = []
        self.stuck: set[tuple[int, int]] = set()
        self.now = 0

    @property
    def ours(self) -> list[OurWindow]:
        return self.windows  # type: ignore[return-value]

    def op_add_sequence(self, step: Step) -> Answer:
        one = self.requests.get(step["request_id"]) if step.get("use_existing_request") else None
        one = one or self._new(step, step.get("request"))
        self._check_items(one.content)
        self.requests[step["request_id"]] = one
        one.num_tokens = one.prompt_length = length = step["input_length"]
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
        self.stuck -= {(one.request_id, number) for number in range(len(self.ours))}
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

    def _check_items(self, content: dict[str, Any] | None) -> None:
        items = (content or {}).get("multimodal") or {}
        if len({len(items.get(name) or []) for name in ("hashes", "positions", "lengths")}) > 1:
            self.causes.add("core-D13")
            raise NoFreeBlock

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
                is_shared = len(nodes) < self._num_shared(one)
                count, source = window.source(parent, one.key(rest, at), is_shared)
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

    def _front(self, table: list[list[Block | None]]) -> int:
        return next(at for at, block in enumerate(table[0]) if block is not None)

    def _longest(self, window: OurWindow, match: tuple[list[Block], int, Block | None], limit: int) -> int:
        nodes, count, _ = match
        length = min(limit, len(nodes) * self.size + count)
        if length < len(nodes) * self.size and length % self.size:
            node = nodes[length // self.size]
            free = not node.refs and not self._is_depended_on(window, node)
            may_serve = node.block_id != HOLE and (self.config["copy_on_partial_reuse"] or free)
            if not may_serve or not self.config["enable_partial_reuse"]:
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
            leaf = not source.refs and whole < self._num_shared(one) and not self._is_depended_on(window, source)
            if whole >= self._num_shared(one):
                self.causes.add("core-D44")
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

    def _num_shared(self, one: SeedSequence) -> int:
        """Leading blocks of the prompt that all beams share."""
        num_blocks = ceil_div(one.num_tokens, self.size)
        if one.beam_width == 1 or self.config["cache_type"] == "cross":
            return num_blocks
        ends = one.num_tokens % self.size == 0 and not self.config["enable_block_reuse"]
        return num_blocks if ends else num_blocks - 1

    def _places(self, window: OurWindow, one: SeedSequence, start: int, stop: int) -> list[tuple[int, tuple[int, ...]]]:
        """Which block goes to which ordinal of which beams."""
        every, shared = tuple(range(one.beam_width)), self._num_shared(one)
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
            for beam in table:
                beam.append(plan["source"])
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
            source.priority, source.duration = or_default(wish)
        source.key = None

    def _take(self, window: OurWindow, plan: dict[str, Any], wanted: list[Wish]) -> list[Block]:
        """Bring what lies lower, then take; the source of a copy stays out of reach (D5)."""
        source, lower = plan["source"], [block for block in plan["path"] if block.level]
        if plan["takes_over"]:
            lower += [source] if source.level else []
        if source is None or plan["takes_over"] or source not in window.queue:
            window.bring(lower, len(wanted))
            return window.take_many(wanted)
        level = [block for block in window.queue if block.level == 0]
        if source in sorted(level, key=lambda block: block.rank)[: len(wanted) + len(lower)]:
            self.causes.add("core-D5")
        its_place = Block(HOLE, ASIDE)
        window.queue[window.queue.index(source)] = its_place
        window.bring(lower, len(wanted))
        taken = window.take_many(wanted)
        window.queue[window.queue.index(its_place)] = source
        return taken

    def _note_copy(self, one: SeedSequence, plan: dict[str, Any], wishes: list[Wish]) -> None:
        source = plan["source"]
        if source is None or plan["takes_over"] or source.key is None:
            return
        if or_default(wishes[plan["whole"]]) != (source.priority, source.duration):
            self.causes.add("core-D39")
        if source.full and not source.refs and not source.children:
            self.causes.add("core-D35")
        if source.key.items != one.key(list(source.key.tokens), plan["whole"] * self.size).items:
            self.causes.add("core-D53")
