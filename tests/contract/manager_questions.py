"""Operations that ask: tables, lookups, forecasts, events, counters, shapes.

In:  steps of a scenario.
Out: the fields that the cases may expect.
Law: nothing in the manager changes.
"""

from contract.manager_state import Answer, ManagerState, Step, name_of
from contract.requests import PHASES
from kv_core.layout import PoolKind, layer_positions
from kv_core.scheduling import blocks_for_next_step, blocks_to_completion
from kv_core.tiers import Tier


class Questions(ManagerState):
    """Operations that change nothing."""

    def op_find_blocks_in_reuse_tree(self, step: Step) -> Answer:
        found = self._manager.lookup(self._asked(step), self._window(step))
        blocks = -(-len(step["tokens"]) // self._config["tokens_per_block"])
        complete = found.num_tokens > (blocks - 1) * self._config["tokens_per_block"]
        return {"found": complete, "chain_block_ids": list(found.block_ids) if complete else []}

    def op_find_new_context_block(self, step: Step) -> Answer:
        missing = self._manager.missing_prefix(self._asked(step))
        return {"new_block_tokens": None if missing is None else step["tokens"][: missing.num_tokens]}

    def op_is_sequence_valid_for_store_for_reuse(self, step: Step) -> Answer:
        one, valid = self._one(step), {}
        for window in self._windows:
            table = self._manager.block_ids(name_of(one), window)
            valid[str(window)] = all(block_id is not None for block_id in table)
        only = valid[str(self._window(step))] if "window" in step or len(valid) == 1 else valid
        return {"value": only, "valid": only}

    def op_verify_queue_integrity(self, step: Step) -> Answer:
        self._manager.check()
        return {"ok": True}

    def op_get_events(self, step: Step) -> Answer:
        self._manager.flush_events()
        return {"events": self._manager.take_events()}

    def op_get_needed_blocks_one_step(self, step: Step) -> Answer:
        one, window = self._one(step), step["window"]
        steps = 2 if step.get("two_steps_look_ahead") else 1
        demand = one.demand(self._config["cache_type"])
        return {
            "value": blocks_for_next_step(demand, self._limits(window), self._progress(one, window), num_steps=steps)
        }

    def op_get_remaining_blocks_to_completion(self, step: Step) -> Answer:
        one, window = self._one(step), step["window"]
        demand = one.demand(self._config["cache_type"])
        return {"value": blocks_to_completion(demand, self._limits(window), self._progress(one, window))}

    def op_set_request_state(self, step: Step) -> Answer:
        self._one(step).phase = PHASES[step["state"]]
        return {}

    def op_get_counters(self, step: Step) -> Answer:
        windows = self._manager.stats().windows
        return {
            "alloc_total_blocks": sum(one.num_allocated for one in windows),
            "alloc_new_blocks": sum(one.num_fresh for one in windows),
            "reused_blocks": sum(one.num_reused for one in windows),
            "missed_blocks": sum(one.num_missed for one in windows),
            "used_blocks": sum(one.tiers[Tier.DEVICE].num_used for one in windows),
        }

    def op_inspect_request(self, step: Step) -> Answer:
        admission = self._one(step).admission
        return {"prepopulated": 0 if admission is None else admission.num_prepopulated}

    def op_inspect_manager(self, step: Step) -> Answer:
        config = self._manager.config
        primary = sum(one.num_device for one in config.windows)
        per_sequence = config.max_blocks_per_sequence
        return {
            "tokens_per_block": config.tokens_per_block,
            "max_num_blocks": primary + sum(one.num_host for one in config.windows),
            "primary_blocks": primary,
            "secondary_blocks": sum(one.num_host for one in config.windows),
            "num_pools": len(self._pools),
            "block_sizes": [pool.page_elements for pool in self._pools],
            "layers_per_pool": [len(pool.layers) for pool in self._pools],
            "pool_kinds": [pool.kind.value for pool in self._pools],
            "is_variable_window": len(self._windows) > 1,
            "windows": self._windows,
            "max_blocks_per_seq": per_sequence
            if len(self._windows) == 1
            else {str(window): per_sequence for window in self._windows},
        }

    def op_get_layer_to_pool_mapping(self, step: Step) -> Answer:
        return {"mapping": [list(position) for position in layer_positions(self._pools)]}

    def op_get_block_offsets(self, step: Step) -> Answer:
        one, offsets = self._one(step), []
        data = [(at, pool) for at, pool in enumerate(self._pools) if pool.kind is PoolKind.KV]
        for number, pool in data:
            for beam in range(one.beam_width):
                slots = self._manager.slots(name_of(one), pool.window or 0, beam)
                pages = [pool.page_offsets(slot) for slot in slots if slot is not None]
                rows = {"k": [keys for keys, _ in pages], "v": [values for _, values in pages]}
                offsets.append({"pool": number, "beam": beam} | rows)
        return {"offsets": offsets}

    # Dry runs of releases.

    def op_start_scheduling(self, step: Step) -> Answer:
        self._dry_run = self._manager.dry_run()
        return {}

    def op_scheduling_remove_sequence(self, step: Step) -> Answer:
        self._dry_run.release(name_of(self._one(step)))
        return {}

    def op_scheduling_has_free_blocks(self, step: Step) -> Answer:
        return {"value": self._dry_run.num_free(step["window"]) >= step["num_required"]}
