"""Requests of a schedule, by number, and what became of them.

Out: Request: its names, its tokens, its blocks at each rank, when it was ordered there and with what outcome.
"""

from dataclasses import dataclass, field

from kv_core.ids import RequestId, TransferId
from kv_core.spans import Span
from kv_testing.sim.instances import Instance
from kv_transfer.orders import BlockTables, Received

PROMPT = b"k" * 32


@dataclass
class Request:
    """One prompt that a prefill instance has and a decode instance wants."""

    number: int
    prefill: Instance
    decode: Instance
    tokens: Span
    is_growing: bool = False
    ordered: dict[int, float] = field(default_factory=dict)
    run: int = 0
    outcomes: dict[int, Received] = field(default_factory=dict)

    @property
    def transfer_id(self) -> TransferId:
        return TransferId(f"{self.number:032x}")

    @property
    def request_id(self) -> RequestId:
        return RequestId(f"r{self.number}")

    @property
    def consumer(self) -> str:
        return f"{self.decode.incarnation}/{self.request_id}"

    def tables(self, instance: Instance, rank: int) -> BlockTables:
        return instance.places[rank].tables[self.number]
