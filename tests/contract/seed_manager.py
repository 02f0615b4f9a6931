"""The seed's cache manager on the steps of a scenario, for rules that need its answer (core spec 1, 7, 8).

In:  the config of a scenario and its steps, one by one.
Out: the fields that the cases may expect, as the seed gives them; None for an operation that is not modelled.
Law: see `seed_model`.
"""

from dataclasses import dataclass, field
from typing import Any

from contract.seed_model import Block, Clock, Held, Key, Log, NoFreeBlock, SeedWindow
from kv_core.sizing import temporary_window
from kv_core.spans import ceil_div

Step = dict[str, Any]
Answer = dict[str, Any]


@dataclass(slots=True)
class SeedSequence:
    """One request and its sequence."""

    request_id: int
    content: dict[str, Any] | None
    beam_width: int
    tokens: list[tuple[int, int]]
    num_tokens: int = 0
    front_removed: int = 0
    limit: int = 1 << 31
    prepopulated: int = 0
    stats: dict[str, int] = field(default_factory=dict)

    @property
    def retention(self) -> dict[str, Any]:
        return (self.content or {}).get("retention") or {}

    def key(self, run: list[tuple[int, int]], start: int) -> Key:
        content = self.content or {}
        items = mm_keys(content.get("multimodal"), start, start + len(run))
        return Key("extra_ids" in content, content.get("lora_id"), content.get("salt"), items, tuple(run))

    def keys(self, usable: int, size: int, partial: bool) -> list[Key]:
        """Runs of the first `usable` tokens (core spec 1.5)."""
        if usable > len(self.tokens):
            raise NoFreeBlock
        stop = max(usable, 0) if partial else max(usable, 0) // size * size
        return [self.key(self.tokens[at : min(at + size, stop)], at) for at in range(0, stop, size)]


class SeedManager:
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
        one.num_tokens, one.front_removed, one.limit = step["input_length"], 0, 1 << 31
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

    # Growing (7.4) and shrinking.

    def op_append_tokens(self, step: Step) -> None:
        self._one(step).tokens += [(token, 0) for token in step["tokens"]]

    def op_add_token(self, step: Step) -> Answer:
        for _ in range(step["count"]):
            self._grow(self._one(step))
        return self._table(self._one(step))

    def op_decode(self, step: Step) -> Answer:
        for token in step["tokens"]:
            self._one(step).tokens.append((token, 0))
            self._grow(self._one(step))
        return self._table(self._one(step))

    def _grow(self, one: SeedSequence) -> None:
        one.num_tokens += 1
        for window in self.windows:
            held = window.held[one.request_id]
            while one.num_tokens - one.front_removed * self.size >= window.window + self.size:
                if not window.is_sliding or one.beam_width > 1:
                    raise NoFreeBlock
                window.drop(window.blocks[held.beams[0][one.front_removed]])
                one.front_removed += 1
            if (one.num_tokens - 1) % self.size == 0:
                for beams in [[0]] if one.beam_width == 1 else [[beam] for beam in range(one.beam_width)]:
                    window.list_block(held, window.take(one.request_id, *decode_wish(one)), beams)

    def op_rewind_kv_cache(self, step: Step) -> Answer:
        one = self._one(step)
        for _ in range(step["num_tokens"]):
            one.num_tokens -= 1
            for window in self.windows:
                if one.num_tokens % window.window % self.size == 0:
                    held = window.held[one.request_id]
                    held.beams[0].pop()
                    window.drop(held.allocated.pop(), to_front=True)
        del one.tokens[one.num_tokens :]
        return self._table(one)

    # Storing and releasing (4.5, 8.5, 8.6).

    def op_store_context_blocks(self, step: Step) -> Answer:
        one = self._one(step)
        if self.config["enable_block_reuse"] and not (one.content or {}).get("is_dummy"):
            for window in self.windows:
                if not window.is_sliding:
                    self._store(window, one, one.keys(len(one.tokens) - 1, self.size, False))
        return self._table(one)

    op_store_new_block = op_store_context_blocks

    def op_store_blocks_for_reuse(self, step: Step) -> Answer:
        one, pinned = self._one(step), []
        for window in self.windows:
            keys = one.keys(len(one.tokens) - 1, self.size, True)
            pinned = self._store(window, one, keys, bool(step.get("pin_blocks")))
        return {"pinned_block_ids": pinned} | self._table(one)

    def _store(self, window: SeedWindow, one: SeedSequence, keys: list[Key], pin: bool = False) -> list[int]:
        return window.store(keys, [window.blocks[number] for number in window.held[one.request_id].beams[0]], pin)

    def op_remove_sequence(self, step: Step) -> None:
        one = self._one(step)
        told = one.tokens
        if step.get("request_tokens_override") is not None:
            one.tokens = [(token, 0) for token in step["request_tokens_override"]]
        stores = step.get("with_request", True) and one.content is not None and not one.content.get("is_dummy")
        stores = stores and one.beam_width == 1 and self.config["enable_block_reuse"]
        stores = stores and all(window.valid[one.request_id] for window in self.windows)
        for window in self.windows:
            held = window.held[one.request_id]
            if stores:
                window.store(one.keys(len(one.tokens) - 1, self.size, True), held.allocated)
            for block in reversed(held.allocated[one.front_removed :]):
                window.drop(block)
            one.front_removed = 0
        for window in self.windows:
            del window.held[one.request_id], window.valid[one.request_id]
        one.tokens = told

    def op_pin_blocks(self, step: Step) -> None:
        for window in self.windows:
            for block in window.held[step["request_id"]].allocated:
                block.refs += 1

    def op_unpin_blocks_by_id(self, step: Step) -> None:
        for number in step["block_ids"]:
            if not 0 <= number < len(self.windows[0].blocks) or not self.windows[0].blocks[number].refs:
                raise NoFreeBlock
            self.windows[0].drop(self.windows[0].blocks[number])

    def op_get_last_block_id(self, step: Step) -> Answer:
        return {"block_id": self.windows[0].held[step["request_id"]].beams[0][-1]}

    # Time, tiers, questions.

    def op_advance_time_ms(self, step: Step) -> None:
        self.clock.now += step["ms"]

    def op_refresh_blocks(self, step: Step) -> None:
        for window in self.windows:
            window.refresh()

    def op_offload_block(self, step: Step) -> Answer:
        window, block = self._block(step)
        if block.level == 0 and window.num_free(1):
            lower = window.victim(1)
            window.claim(lower)
            window.swap(block, lower)
            window.release(lower)
            if block.name is not None:
                window.log.level(window.window, block.name, 0, 1)
        return self.op_inspect_block(step)

    def op_onboard_block(self, step: Step) -> Answer:
        window, block = self._block(step)
        window.onboard(step["request_id"], block)
        return self.op_inspect_block(step)

    def op_set_block_priority(self, step: Step) -> None:
        self._block(step)[1].priority = step["priority"]

    def op_inspect_block(self, step: Step) -> Answer:
        block = self._block(step)[1]
        parent = None if block.prev is None else block.prev.block_id
        primary, held = block.level == 0, block.refs > 0
        return {"is_primary": primary, "prev_block_id": parent, "priority": block.priority, "has_refs": held}

    def op_find_blocks_in_reuse_tree(self, step: Step) -> Answer:
        window = self._window(step)
        one = self._new({"request_id": -1}, step)
        cursor: Block | None = window.root
        chain = []
        for key in one.keys(len(one.tokens), self.size, True):
            cursor = window.find(cursor, key, True, True)[2]
            if cursor is None:
                return {"found": False, "chain_block_ids": []}
            chain.append(cursor.block_id)
        return {"found": True, "chain_block_ids": chain}

    def op_find_new_context_block(self, step: Step) -> Answer:
        one, cursor = self._new({"request_id": -1}, step), self.windows[0].root
        for at, key in enumerate(one.keys(len(one.tokens), self.size, False)):
            found = self.windows[0].find(cursor, key, False, False)[2]
            if found is None:
                return {"new_block_tokens": step["tokens"][: (at + 1) * self.size]}
            cursor = found
        return {"new_block_tokens": None}

    def op_get_events(self, step: Step) -> Answer:
        return {"events": self.log.take()}

    def op_get_counters(self, step: Step) -> Answer:
        primary = sum(counts[0] for counts in self.config["blocks_per_window"].values())
        return self._counts() | {"used_blocks": primary - sum(window.num_free() for window in self.windows)}

    def op_inspect_request(self, step: Step) -> Answer:
        return {"prepopulated": self._one(step).prepopulated}

    def op_verify_queue_integrity(self, step: Step) -> Answer:
        return {"ok": not any(block.refs for window in self.windows for block in window.queue)}

    def op_is_sequence_valid_for_store_for_reuse(self, step: Step) -> Answer:
        valid = {str(window.window): window.valid[step["request_id"]] for window in self.windows}
        only = valid[str(self._window(step).window)] if "window" in step or len(valid) == 1 else valid
        return {"value": only, "valid": only}

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


def mm_keys(items: dict[str, Any] | None, start: int, stop: int) -> tuple[tuple[Any, ...], ...]:
    """Core spec 1.4; lists of unequal length give nothing (D13)."""
    lists = [(items or {}).get(name) or [] for name in ("hashes", "positions", "lengths")]
    if len({len(one) for one in lists}) != 1:
        return ()
    return tuple(
        (tuple(words), max(0, start - position), max(0, position - start))
        for words, position, length in zip(*lists, strict=True)
        if stop > position and start < position + length
    )


def wishes_of(retention: dict[str, Any], size: int, length: int) -> list[tuple[int | None, int | None]]:
    """Core spec 13.3: the range that holds a block's first token decides (D45)."""
    wishes: list[tuple[int | None, int | None]] = []
    for first in range(0, length, size):
        found = (
            (one.get("priority", 35), one.get("duration_ms"))
            for one in retention.get("ranges", [])
            if one["start"] <= first and (one.get("end") is None or first < one["end"])
        )
        wishes.append(next(found, (None, None)))
    return wishes


def decode_wish(one: SeedSequence) -> tuple[int, int | None]:
    """Priority and duration of blocks outside of the prompt."""
    return one.retention.get("decode_priority", 35), one.retention.get("decode_duration_ms")
