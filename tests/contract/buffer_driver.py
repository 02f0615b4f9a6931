"""Operations of the cases on our staging memory.

In:  steps of a scenario whose target is `trans_buffer_manager`.
Out: the fields that the cases may expect of each.
Law: this only translates. A buffer is a lease of as much of a side's arena; it goes by the lowest number that is not in
     use. Targets are leases of parts of it. What waits for a buffer is served in its order when one is given back.
"""

from math import prod
from typing import Any

from contract.case import UnknownKind
from contract.transfer_states import DTYPES
from kv_core.errors import CallerError, CapacityError
from kv_transfer.config import TransferConfig, default_arena_bytes
from kv_transfer.plan.elements import ITEM_BYTES
from kv_transfer.plan.sizing import staging_bytes
from kv_transfer.regions import Region, host_region
from kv_transfer.staging import GRANULE_BYTES, Arena, StagingLease

Step = dict[str, Any]
Answer = dict[str, Any]


class BufferDriver:
    """Runs steps."""

    goes_on = False

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._sides: dict[str, _Side] = {}

    def call(self, step: Step) -> Answer:
        operation = getattr(self, f"op_{step['op']}", None)
        if operation is None:
            raise UnknownKind(f"operation {step['op']!r}")
        if not self._sides:
            self._sides = _sides(self._config)
        answer: Answer = operation(step) or {}
        return answer

    def known(self, step: Step) -> dict[str, Any]:
        return {"buffer_bytes": next(iter(self._sides.values())).buffer_bytes if self._sides else 0}

    def op_construct(self, step: Step) -> Answer:
        return {}

    def op_assign_buffer_index(self, step: Step) -> Answer:
        index = self._sides[step["side"]].assign(step.get("waiter"))
        return {"index": index, "blocks": index is None}

    def op_free_buffer_index(self, step: Step) -> Answer:
        self._sides[step["side"]].free(step["index"])
        return {}

    def op_join(self, step: Step) -> Answer:
        for side in self._sides.values():
            if step["waiter"] in side.served:
                return {"index": side.served.pop(step["waiter"])}
        return {"index": "still waiting"}

    def op_get_buffer(self, step: Step) -> Answer:
        lease = self._sides[step["side"]].leases.get(step["index"])
        return {"present": lease is not None, "bytes": lease.slice.num_bytes if lease else 0}

    def op_get_or_allocate_buffers(self, step: Step) -> Answer:
        item = ITEM_BYTES[DTYPES[self._config["dtype"]]]
        leases = self._sides[step["side"]].parts(step["index"], [size * item for size in step["target_sizes"]])
        sizes = [lease.slice.num_bytes // item for lease in leases]
        return {"num_buffers": len(leases), "covered": len(leases), "only_dynamic": False, "sizes": sizes}


class _Side:
    """The arena of one side, cut into whole buffers."""

    def __init__(self, arena_bytes: int, count: int) -> None:
        self.buffer_bytes = arena_bytes // count
        self._arena = Arena(host_region(arena_bytes), self.buffer_bytes)
        self._waiting: list[str | None] = []
        self.leases: dict[int, StagingLease] = {}
        self.served: dict[str | None, int] = {}

    def assign(self, waiter: str | None) -> int | None:
        lease = self._arena.lease(self.buffer_bytes, "case")
        if lease is None:
            self._waiting.append(waiter)
            return None
        index = min(set(range(len(self.leases) + 1)) - set(self.leases))
        self.leases[index] = lease
        return index

    def free(self, index: int) -> None:
        if index not in self.leases:
            raise CallerError(f"nobody has this buffer: index={index}, held={sorted(self.leases)}")
        self.leases.pop(index).release()
        if self._waiting:
            waiter = self._waiting.pop(0)
            served = self.assign(waiter)
            assert served is not None
            self.served[waiter] = served

    def parts(self, index: int, sizes: list[int]) -> list[StagingLease]:
        """Leases inside a buffer for as many of the sizes as there is room at once, in order; the others would wait."""
        whole = self.leases[index].slice
        region = Region(whole.address, whole.num_bytes, whole.region.kind, whole.region.device_id, whole.tensor)
        arena = Arena(region, min(GRANULE_BYTES, whole.num_bytes))
        found = []
        for size in sizes:
            try:
                lease = arena.lease(size, "case")
            except CapacityError:  # it would travel in chunks
                continue
            if lease is not None:
                found.append(lease)
        return found


def _sides(config: dict[str, Any]) -> dict[str, _Side]:
    size = _buffer_bytes(config)
    counts = {"send": config["send_buffer_count"], "recv": config["recv_buffer_count"]}
    ours = TransferConfig(send_arena_bytes=counts["send"] * size, receive_arena_bytes=counts["recv"] * size)
    return {
        "send": _Side(ours.send_arena_bytes, counts["send"]),
        "recv": _Side(ours.receive_arena_bytes, counts["recv"]),
    }


def _buffer_bytes(config: dict[str, Any]) -> int:
    if "transfer_buffer_bytes" in config:
        return int(config["transfer_buffer_bytes"])
    if config["max_num_tokens"] is None:
        return default_arena_bytes(None)
    planes = 1 if config["cache_type"] == "self_k_only" else 2
    item = ITEM_BYTES[DTYPES[config["dtype"]]]
    token = prod(config[key] for key in ("num_layers", "num_kv_heads", "size_per_head")) * planes * item
    window = config["max_blocks_per_sequence"] * config["tokens_per_block"]
    return staging_bytes({window: token}, config["max_num_tokens"], config["tokens_per_block"])
