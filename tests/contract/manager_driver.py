"""Operations of the cases on our KVCacheManager.

In:  steps of a scenario whose target is `kv_cache_manager`.
Out: the fields that the cases may expect of each.
Law: this only translates. Where the cases name blocks to unpin, the pins that hold them are found here.
"""

from itertools import groupby
from typing import Any

from contract.case import UnknownKind
from contract.manager_state import Answer, Step, name_of
from contract.notnow import NotNow
from contract.range_questions import RangeQuestions
from contract.requests import CaseRequest
from kv_core.errors import CallerError
from kv_core.ids import BlockId, RequestId
from kv_core.pins import Pin
from kv_core.scheduling import Phase, Progress, blocks_to_completion
from kv_core.tiers import Tier


class ManagerDriver(RangeQuestions):
    """Runs steps."""

    goes_on = False

    # Steps.

    def call(self, step: Step) -> Answer:
        operation = getattr(self, f"op_{step['op']}", None)
        if operation is None:
            raise UnknownKind(f"operation {step['op']!r}")
        answer: Answer = operation(step) or {}
        self._memory.execute(self._manager.take_copies())
        return {"free_blocks": self._manager.num_free()} | answer

    def known(self, step: Step) -> dict[str, Any]:
        one = self._requests.get(step.get("request_id", -1))
        if one is None:
            return {"request": None, "state": None}
        return {"request": one.content, "state": one.phase.name.lower()}

    def op_make_request(self, step: Step) -> Answer:
        content = step["request"]
        self._requests[step["request_id"]] = CaseRequest(
            step["request_id"], content, len(content["tokens"]), step.get("beam_width", 1)
        )
        return {}

    def op_add_sequence(self, step: Step) -> Answer:
        one = self._requests[step["request_id"]] if step.get("use_existing_request") else self._new(step)
        admission = self._manager.add(one.request(self._config["cache_type"]), beam_width=step["beam_width"])
        if admission is None:
            raise NotNow("add_sequence")
        one.admission = admission
        one.listed.clear()
        stats = admission.stats
        counts = {
            "alloc_total_blocks": stats.allocated,
            "alloc_new_blocks": stats.fresh,
            "reused_blocks": stats.reused,
            "missed_blocks": stats.missed,
        }
        answer = {"prepopulated": admission.num_prepopulated, "stats": counts, "kv_cache_hit_rate": stats.hit_rate}
        return answer | self._table(one)

    def _new(self, step: Step) -> CaseRequest:
        one = CaseRequest(step["request_id"], step.get("request"), step["input_length"], step["beam_width"])
        self._requests[step["request_id"]] = one
        return one

    def op_append_tokens(self, step: Step) -> Answer:
        self._told(self._one(step), step["tokens"])
        return {}

    def op_add_token(self, step: Step) -> Answer:
        for _ in range(step["count"]):
            self._grow(self._one(step))
        return self._table(self._one(step))

    def op_decode(self, step: Step) -> Answer:
        one = self._one(step)
        for token in step["tokens"]:
            self._told(one, [token])
            self._grow(one)
        return self._table(one)

    def op_rewind_kv_cache(self, step: Step) -> Answer:
        one = self._one(step)
        told = len(one.tokens)
        if not self._manager.rewind(name_of(one), step["num_tokens"]):
            raise NotNow("rewind_kv_cache")
        if one.content is not None:
            length = self._manager.num_tokens(name_of(one))
            del one.tokens[min(told, length) :]
        return self._table(one)

    def op_remove_sequence(self, step: Step) -> Answer:
        one = self._one(step)
        override = step.get("request_tokens_override")
        num_filled = None
        if override is not None:
            if one.tokens[: len(override)] != override:
                raise UnknownKind("removal with tokens that are not the sequence's own")
            num_filled = max(0, len(override) - 1)
        publish = step.get("with_request", True) and one.content is not None
        self._manager.release(name_of(one), publish=publish, num_filled=num_filled)
        return {}

    def op_store_context_blocks(self, step: Step) -> Answer:
        self._manager.publish(name_of(self._one(step)))
        return self._table(self._one(step))

    op_store_new_block = op_store_context_blocks

    def op_store_blocks_for_reuse(self, step: Step) -> Answer:
        one = self._one(step)
        self._manager.publish(name_of(one), partial=True)
        pinned = self._pin_stored(one) if step.get("pin_blocks") else []
        return {"pinned_block_ids": pinned} | self._table(one)

    def op_pin_blocks(self, step: Step) -> Answer:
        self._pins.append(self._manager.pin(name_of(self._one(step))))
        return {}

    def _pin_stored(self, one: CaseRequest) -> list[BlockId]:
        """Pin what storing entered into the tree, all but what holds the last token alone; the last window's ids."""
        pin = self._manager.pin(name_of(one))
        num_stored = (
            max(0, len(one.tokens) - 1 + self._config["tokens_per_block"] - 1) // self._config["tokens_per_block"]
        )
        behind = {}
        for window, ids in pin.block_ids.items():
            stored = set(self._manager.block_ids(name_of(one), window)[:num_stored])
            behind[window] = [block_id for block_id in ids if block_id not in stored]
        self._manager.unpin(pin, behind)
        self._pins.append(pin)
        return list(pin.block_ids[self._windows[-1]])

    def op_unpin_blocks_by_id(self, step: Step) -> Answer:
        """Each id is given up in the first window, by the oldest pin that has it."""
        given: dict[Pin, list[BlockId]] = {}
        window = self._windows[0]
        for block_id in step["block_ids"]:
            holders = (pin for pin in self._pins if block_id in pin.left(window).difference(given.get(pin, ())))
            pin = next(holders, None)
            if pin is None:
                raise CallerError(f"no pin holds this: ours={[pin.block_ids for pin in self._pins]}, theirs={block_id}")
            given.setdefault(pin, []).append(block_id)
        for pin, block_ids in given.items():
            self._manager.unpin(pin, {window: block_ids})
        return {}

    def op_get_last_block_id(self, step: Step) -> Answer:
        return {"block_id": self._manager.block_ids(name_of(self._one(step)), self._windows[0])[-1]}

    # Time, tiers, blocks.

    def op_advance_time_ms(self, step: Step) -> Answer:
        self._now_ms += step["ms"]
        return {}

    def op_refresh_blocks(self, step: Step) -> Answer:
        self._manager.refresh()
        return {}

    def op_offload_block(self, step: Step) -> Answer:
        self._manager.offload(self._window(step), step["block_id"])
        return self.op_inspect_block(step)

    def op_onboard_block(self, step: Step) -> Answer:
        self._manager.onboard(self._window(step), step["block_id"])
        return self.op_inspect_block(step)

    def op_set_block_priority(self, step: Step) -> Answer:
        self._manager.set_priority(self._window(step), step["block_id"], step["priority"])
        return {}

    def op_inspect_block(self, step: Step) -> Answer:
        view = self._manager.inspect(self._window(step), step["block_id"])
        parent = None if not view.published else -1 if view.parent is None else view.parent
        return {
            "is_primary": view.tier == Tier.DEVICE,
            "prev_block_id": parent,
            "priority": view.priority,
            "has_refs": view.held,
        }

    def op_fill_block(self, step: Step) -> Answer:
        self._memory.fill(self._place(step), step.get("tag", step.get("value")))
        return {}

    def op_clear_block(self, step: Step) -> Answer:
        self._memory.fill(self._place(step), 0)
        return {}

    def op_check_block_content(self, step: Step) -> Answer:
        self._memory.execute(self._manager.take_copies())
        tags = self._memory.tags(self._place(step))
        runs = [[tag, len(list(group))] for tag, group in groupby(tags)]
        return {"tags": tags, "slots": tags, "content": tags, "runs": runs}

    # Many requests at once.

    def op_fill_and_complete(self, step: Step) -> Answer:
        remaining, count = self._fill(step)
        for request_id in range(1, count + 1):
            self._decode_all(request_id, step["max_output_length"])
            self._manager.release(RequestId(str(request_id)))
        free = self._manager.num_free()
        self._build()
        _, count = self._fill(step)
        return {
            "remaining_blocks_per_request": remaining,
            "num_requests": count,
            "free_blocks_after_completion": free,
            "parallel_run_raises": not self._decode_in_turn(count, step["max_output_length"]),
        }

    def _fill(self, step: Step) -> tuple[int, int]:
        window, prompt = self._windows[0], step["prompt_length"]
        budget, count, remaining = self._manager.num_free(), 0, 0
        while True:
            content = {"tokens": [count + 1] * prompt, "max_new_tokens": step["max_output_length"]}
            one = CaseRequest(count + 1, content, prompt, 1)
            remaining = blocks_to_completion(one.demand("self"), self._limits(window), Progress(Phase.CONTEXT))
            if budget < remaining or self._manager.add(one.request("self")) is None:
                break
            self._manager.publish(name_of(one))
            budget, count = budget - remaining, count + 1
        self._manager.refresh()
        return remaining, count

    def _decode_all(self, request_id: int, num_tokens: int) -> None:
        name = RequestId(str(request_id))
        for _ in range(num_tokens):
            self._manager.extend(name, [request_id])
            if not self._manager.grow(name):
                raise NotNow(f"grow {request_id}")

    def _decode_in_turn(self, count: int, num_tokens: int) -> bool:
        for _ in range(num_tokens):
            for request_id in range(1, count + 1):
                name = RequestId(str(request_id))
                self._manager.extend(name, [request_id])
                if not self._manager.grow(name):
                    return False
        return True
