"""What the scheduler side needs of others: the instance's door to its peers, and an engine's requests.

Law: protocols only; `kv_transfer.instance.InstanceDoor` and `vllm.translate.RequestView` fit them without knowing.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kv_core.ids import RequestId, TransferId
from kv_core.keys import BlockKey, Scope
from kv_engine_adapter.orders import Tables
from kv_engine_adapter.tier_events import BlockName
from kv_transfer.orders import Errand


class Door(Protocol):
    """What we need of the instance's door to its peers (`kv_transfer.instance.InstanceDoor`)."""

    @property
    def address(self) -> tuple[str, int]: ...

    def open_offer(
        self, transfer_id: TransferId, request_id: RequestId, prompt_key: bytes, lease_s: float | None = None
    ) -> None: ...

    def restart_lease(self, request_id: RequestId, lease_s: float | None = None) -> None: ...

    def withdraw_offer(self, request_id: RequestId, reason: str) -> None: ...

    def poll_settled(self) -> Sequence["SettledLike"]: ...

    def hold(self, errand: Errand) -> None: ...

    def release(self, errand: Errand) -> None: ...

    def close(self, timeout_s: float = 5.0) -> None: ...


class SettledLike(Protocol):
    """An offer that no longer serves anybody."""

    @property
    def transfer_id(self) -> TransferId: ...
    @property
    def request_id(self) -> RequestId: ...
    @property
    def reason(self) -> str: ...


class ScheduledRequest(NamedTuple):
    """What one engine step computes of a request: tokens [num_computed, num_computed + num_scheduled)."""

    request_id: RequestId
    num_computed: int
    num_scheduled: int
    blocks: Tables
    """By cache group: those that it is given for this step, at its first all; none at all if it is given none."""


class RequestView(Protocol):
    """What we read of an engine's request."""

    @property
    def request_id(self) -> RequestId: ...
    @property
    def family(self) -> str:
        """Equal for the requests that one client call was cut into (`n` > 1, several prompts)."""

    @property
    def params(self) -> Mapping[str, object] | None: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def needs_every_token(self) -> bool:
        """The client wants what only computing every prompt token gives (log-probabilities of the prompt)."""

    @property
    def is_rejected(self) -> bool:
        """Refused before it reached the engine: its prompt is not the client's, only its parameters are."""

    def prompt_key(self) -> BlockKey | str:
        """Digest of the prompt and its sharing scope, or why it has none."""


class CachedRequest(Protocol):
    """What the tiers read of an engine's request."""

    @property
    def request_id(self) -> RequestId: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def needs_every_token(self) -> bool: ...
    @property
    def num_tokens(self) -> int:
        """Of the prompt and generated so far."""

    def all_tokens(self) -> Sequence[int]:
        """Those `num_tokens`."""

    def scope(self) -> Scope | str:
        """Who may share its cache, or why nobody may."""

    def block_names(self, tokens_per_block: int, hashes_per_block: int) -> Sequence[BlockName]:
        """What the engine calls the whole blocks of its tokens, from the first on."""

    @property
    def arguments(self) -> Mapping[str, object] | None:
        """The extra arguments that a client may add, unchecked."""
