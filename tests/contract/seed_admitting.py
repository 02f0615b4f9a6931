"""The seed admits requests (core spec 4.3, 8.2 to 8.4).

In:  the config of a scenario and its steps that add.
Out: tables and statistics.
Law: see `seed_model`.
"""

from typing import Any

from contract.seed_model import Block, Clock, Held, Key, Log, SeedWindow, TooMuchFound
from contract.seed_sequence import Answer, SeedSequence, Step, decode_wish, wishes_of
from kv_core.sizing import temporary_window
from kv_core.spans import ceil_div


class SeedAdmitting:
    """All windows, ascending."""

    window_class: type[SeedWindow] = SeedWindow

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.size: int = config["tokens_per_block"]
        self.clock = Clock()
        self.log = Log(bool(config.get("event_buffer_max_size")))
        counts = sorted((int(window), numbers) for window, numbers in config["blocks_per_window"].items())
        self.windows = [self.window_class(config, window, numbers, self.clock, self.log) for window, numbers in counts]
        self.requests: dict[int, SeedSequence] = {}
        self.listed: dict[tuple[int, int, int], list[int | None]] = {}

    def call(self, step: Step) -> Answer | None:
        """The seed's answer; NoFreeBlock where it raises."""
        operation = getattr(self, f"op_{step['op']}", None)
        if operation is None:
            return None
        answer: Answer = operation(step) or {}
        return {"free_blocks": sum(window.num_free() for window in self.windows)} | answer

    # Adding (4.3, 8.2 to 8.4).

    def op_make_request(self, step: Step) -> None:
        self.requests[step["request_id"]] = self._new(step, step["request"])

    def _new(self, step: Step, content: dict[str, Any] | None) -> SeedSequence:
        tokens = (content or {}).get("tokens", ())
        extra = (content or {}).get("extra_ids") or [0] * len(tokens)
        unique = list(zip(tokens, extra, strict=True))
        return SeedSequence(step["request_id"], content, step.get("beam_width", 1), unique)

    def op_add_sequence(self, step: Step) -> Answer:
        one = self.requests.get(step["request_id"]) if step.get("use_existing_request") else None
        one = one or self._new(step, step.get("request"))
        self.requests[step["request_id"]] = one
        one.num_tokens = one.prompt_length = step["input_length"]
        one.front_removed, one.limit = 0, 1 << 31
        before = self._counts()
        for window in self.windows:
            window.valid[one.request_id] = True
        for window in self.windows:
            self._add(window, one, step["input_length"])
        after = self._counts()
        one.stats = {name: after[name] - before[name] for name in after}
        rate = one.stats["reused_blocks"] / max(1, one.stats["reused_blocks"] + one.stats["missed_blocks"])
        answer = {"prepopulated": one.prepopulated, "stats": one.stats, "kv_cache_hit_rate": rate}
        return answer | self._table(one)

    def _add(self, window: SeedWindow, one: SeedSequence, length: int) -> None:
        longest = max(window.window, self.config["max_sequence_length"])
        length = min(length, longest + self._temporary(window))
        held = window.held[one.request_id] = Held([[] for _ in range(one.beam_width)])
        if not self.config["enable_block_reuse"] or one.content is None:
            self._add_plainly(window, one, held, length)
            return
        num_blocks = ceil_div(length, self.size)
        keys: list[Key] = one.keys(length - 1, self.size, True)
        if length % self.size == 1:
            keys.append(one.key([], length - 1))
        matched = self._load(window, one, held, keys, num_blocks, length)
        one.limit = matched
        extra = self.config.get("connector_matched_tokens") or 0
        one.prepopulated = matched + (0 if one.content.get("is_dummy") else extra)
        if one.prepopulated >= length:
            raise TooMuchFound

    def _load(
        self, window: SeedWindow, one: SeedSequence, held: Held, keys: list[Key], num_blocks: int, length: int
    ) -> int:
        shared = num_blocks if one.beam_width == 1 else num_blocks - 1
        wishes = wishes_of(one.retention, self.size, length)
        cursor: Block | None = window.root
        matched = 0
        for at in range(shared):
            key = keys[at] if at < len(keys) else None
            partial, count, found = window.find(
                cursor, key, self.config["enable_partial_reuse"], self.config["copy_on_partial_reuse"]
            )
            priority, duration = wishes[at]
            if found is not None and key is not None and matched + count <= one.limit:
                matched += count
                if priority is not None and priority != found.priority:
                    window.log.priority(window.window, found.name, found.priority, priority)
                cursor, block = self._accept(window, one, found, key, partial, (priority, duration))
                window.onboard(one.request_id, block)
                window.list_block(held, block, range(one.beam_width))
                window.counts["reused_blocks"] += 1
            else:
                self._miss(window, one, held, key, (priority, duration), range(one.beam_width))
                cursor = None
        for at in range(shared, num_blocks):
            for beam in range(one.beam_width):
                self._miss(window, one, held, keys[at] if at < len(keys) else None, wishes[at], [beam], beam == 0)
        return matched

    def _accept(
        self,
        window: SeedWindow,
        one: SeedSequence,
        found: Block,
        key: Key,
        partial: bool,
        wish: tuple[int | None, int | None],
    ) -> tuple[Block | None, Block]:
        if not partial:
            window.claim(found, *wish)
            return found, found
        if found.refs or found.children:
            copy = window.take(one.request_id, found.priority, found.duration)
            copy.key, copy.full, copy.name = key, len(key.tokens) == self.size, ("copy", key)
            return None, copy
        window.unlink(found)
        window.claim(found, *wish)
        return None, found

    def _miss(
        self,
        window: SeedWindow,
        one: SeedSequence,
        held: Held,
        key: Key | None,
        wish: tuple[int | None, int | None],
        beams: Any,
        counted: bool = True,
    ) -> None:
        block = window.take(one.request_id, 35 if wish[0] is None else wish[0], wish[1])
        window.list_block(held, block, beams)
        if key is not None:
            block.key, block.full, block.name = key, len(key.tokens) == self.size, ("new", key)
        window.counts["missed_blocks"] += counted

    def _add_plainly(self, window: SeedWindow, one: SeedSequence, held: Held, length: int) -> None:
        num_blocks = ceil_div(length, self.size)
        share_last = self.config["cache_type"] == "cross" or length % self.size == 0
        for at in range(num_blocks):
            if at < num_blocks - 1 or share_last:
                window.list_block(held, window.take(one.request_id, *decode_wish(one)), range(one.beam_width))
            else:
                for beam in range(one.beam_width):
                    window.list_block(held, window.take(one.request_id, *decode_wish(one)), [beam])

    # Helpers.

    def _one(self, step: Step) -> SeedSequence:
        return self.requests[step["request_id"]]

    def _window(self, step: Step) -> SeedWindow:
        return next(one for one in self.windows if one.window == int(step.get("window", self.windows[0].window)))

    def _block(self, step: Step) -> tuple[SeedWindow, Block]:
        window = self._window(step)
        return window, window.blocks[step["block_id"]]

    def _counts(self) -> dict[str, int]:
        names = self.windows[0].counts
        return {name: sum(window.counts[name] for window in self.windows) for name in names}

    def _temporary(self, window: SeedWindow) -> int:
        inputs = self.config.get("temp_attention_window_inputs")
        if not inputs or not inputs["paged_context_fmha"]:
            return 0
        return temporary_window(window.window, inputs["max_input_len"], inputs["max_num_tokens"])

    def _table(self, one: SeedSequence) -> Answer:
        tables = {}
        for window in self.windows:
            beams = [list(beam) for beam in window.held[one.request_id].beams]
            tables[str(window.window)] = beams[0] if one.beam_width == 1 else beams
        return {"block_ids": tables if len(tables) > 1 else next(iter(tables.values()))}
