"""A door and requests for the scheduler side, without sockets or an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kv_core.ids import RequestId, TransferId
from kv_core.keys import BlockKey, Scope, prompt_key
from kv_transfer.orders import Errand, Settled


@dataclass
class FakeDoor:
    """Remembers what it was told; settles what a test puts into `settled`."""

    address: tuple[str, int] = ("10.0.0.1", 5600)
    offers: list[tuple[TransferId, RequestId, bytes]] = field(default_factory=list)
    releases: list[tuple[str, int, TransferId, bytes | None, str]] = field(default_factory=list)
    holds: list[tuple[str, int, TransferId, bytes | None, str]] = field(default_factory=list)
    settled: list[Settled] = field(default_factory=list)
    closed: int = 0
    restarted: list[RequestId] = field(default_factory=list)
    withdrawn: list[tuple[RequestId, str]] = field(default_factory=list)

    def open_offer(
        self, transfer_id: TransferId, request_id: RequestId, prompt_key: bytes, lease_s: float | None = None
    ) -> None:
        self.offers.append((transfer_id, request_id, prompt_key))

    def restart_lease(self, request_id: RequestId, lease_s: float | None = None) -> None:
        self.restarted.append(request_id)

    def withdraw_offer(self, request_id: RequestId, reason: str) -> None:
        self.withdrawn.append((request_id, reason))

    def poll_settled(self) -> Sequence[Settled]:
        settled, self.settled = self.settled, []
        return settled

    def hold(self, errand: Errand) -> None:
        self.holds.append(errand[:5])

    def release(self, errand: Errand) -> None:
        self.releases.append(errand[:5])

    def close(self, timeout_s: float = 5.0) -> None:
        self.closed += 1


@dataclass
class FakeRequest:
    """A request as the scheduler side reads it."""

    request_id: RequestId
    tokens: Sequence[int]
    params: Mapping[str, object] | None = None
    family: str = "family"
    is_rejected: bool = False
    needs_every_token: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)

    def prompt_key(self) -> BlockKey | str:
        return prompt_key(self.tokens, Scope())
