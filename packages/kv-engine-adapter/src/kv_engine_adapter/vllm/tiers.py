"""The tiers under vLLM: built from its configuration, driven by the connector's hooks.

In:  vLLM's configuration, requests, block tables and outputs.
Out: `SchedulerTiers` and `TierWorker`; the envelope in which the ranks' answers travel.
Law: what the tiers cannot keep is refused at start. Without `tier_host_bytes` nothing here is made.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kv_core.errors import CallerError
from kv_core.ids import RequestId
from kv_engine_adapter.config import FerryConfig
from kv_engine_adapter.orders import Tables
from kv_engine_adapter.tier import PrefixTiers
from kv_engine_adapter.tier_config import TierConfig
from kv_engine_adapter.tier_orders import JobId, Rates, Tally, joined, slowest
from kv_engine_adapter.tier_terms import TierTerms
from kv_engine_adapter.vllm import compat
from kv_engine_adapter.vllm.device_leases import DeviceLeases
from kv_engine_adapter.vllm.groups import ModelCaches
from kv_engine_adapter.vllm.running import RunningRequests
from kv_engine_adapter.vllm.tier_events import published
from kv_engine_adapter.vllm.translate import RequestView, block_tables, parallel_layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kv_engine_adapter.tier_worker import TierWorker
    from kv_engine_adapter.vllm.tensors import EngineCaches
    from kv_transfer.plan.cache_state import CacheState

logger = logging.getLogger(__name__)

_CHUNK = 16
"""Tokens of a request in one step; fewer may be guesses of a speculative decoder."""
NO_RATES = Rates()
TOKENS_PER_RECORD = 64
"""Of the store on disk: the same for all engines that share a directory, whatever their block sizes."""


@dataclass
class TierMetadata(compat.WORKER_METADATA):
    """The answers of one rank, or of several joined; and what they measured, once."""

    tallies: dict[JobId, Tally]
    rates: Rates = NO_RATES

    def aggregate(self, other: "TierMetadata") -> "TierMetadata":
        return TierMetadata(joined(self.tallies, other.tallies), slowest(self.rates, other.rates))


class SchedulerTiers:
    """The scheduler's half: `PrefixTiers` and the blocks that its jobs need."""

    def __init__(self, terms: TierTerms) -> None:
        self.prefixes = PrefixTiers(terms)
        self._leases = DeviceLeases()
        self._tokens_per_block = terms.tokens_per_block
        self._running = RunningRequests(terms.tokens_per_block) if terms.windowed else None
        # Why this one: how long a prefix may be found is what layers that see all tokens have of it.
        self._told_group = terms.windows.index(0) if 0 in terms.windows else 0
        self._manager: KVCacheManager | None = None

    def bind(self, manager: "KVCacheManager") -> None:
        self._manager = manager
        self._leases.bind(manager)

    def allocated(self, view: RequestView) -> None:
        """A request got blocks, and is computed from now on."""
        if self._running is not None:
            self._running.watch(view)

    def num_tokens(self, request: "Request", num_computed: int, of_peer: int | None) -> int | None:
        """How many tokens come from here, unless a peer has some; `None`: ask again in the next step."""
        name: RequestId = request.request_id
        if of_peer != 0:
            self.prefixes.forget(name)
            return of_peer
        told = self.prefixes.repeated(name, request.num_tokens, num_computed)
        return self.prefixes.num_tokens(RequestView(request), num_computed) if told is None else told

    def finished(self, request: "Request", tables: Tables) -> None:
        """A request ended: keep what it computed, if it computed its prompt."""
        view = RequestView(request)
        if self._running is not None:
            self._running.forget(view.request_id)
        self._hold(self.prefixes.finished(view, num_computed(request), tables), tables)

    def _hold(self, job: JobId | None, tables: Tables) -> None:
        if job is not None:
            blocks = self.prefixes.copied_by(job).blocks(self._tokens_per_block)
            self._leases.hold(job, [block for table in tables for block in table[blocks.start : blocks.stop]])

    def update(self, output: "KVConnectorOutput") -> None:
        """What the ranks reported in a step."""
        told = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(told, TierMetadata):
            self._leases.free(self.prefixes.answered(told.tallies))
            self.prefixes.costs.heard(told.rates)
        failed = getattr(output, "failed_recving", None) or ()
        self.prefixes.loads_over(map(RequestId, output.finished_recving or ()), failed)

    def step_began(self, output: "SchedulerOutput") -> None:
        """What the engine computes now: of a request several tokens at once are of its prompt, or nearly."""
        numbers = output.num_scheduled_tokens.values()
        self.prefixes.costs.step_began(sum(number for number in numbers if number >= _CHUNK), sum(numbers))
        if self._running is not None:
            self._keep_windows(self._running, output)

    def _keep_windows(self, running: RunningRequests, output: "SchedulerOutput") -> None:
        """Copy what this step computes, before windows leave it behind in the next one."""
        assert self._manager is not None, "law: no request runs before the manager is bound"
        for view, tokens in running.reached(output):
            tables = block_tables(self._manager.get_blocks(view.request_id).get_block_ids())
            self._hold(self.prefixes.computed(view, tokens, tables), tables)

    def step_ended(self) -> None:
        """Told of every step, in order."""
        self.prefixes.costs.step_ended()

    def take_events(self) -> "list[KVCacheEvent]":
        """Which blocks came into the tiers and left them, for vLLM's publisher."""
        return published(self.prefixes.take_events(), self._tokens_per_block, self._told_group)

    def has_pending_frees(self) -> bool:
        """Whether blocks will come free without anybody being preempted."""
        return len(self._leases) > 0


def num_computed(request: "Request") -> int:
    """How many tokens of a request that has ended are in its blocks for certain; 0 if not even its prompt is.

    An engine may be steps ahead of what it knows, and counts what it loads as computed before it is there; but it
    never loads a whole prompt.
    """
    from vllm.v1.request import RequestStatus

    ended = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED
    if request.status not in ended or request.num_computed_tokens < request.num_prompt_tokens:
        return 0
    # The last token was sampled and not computed.
    return int(min(request.num_computed_tokens, max(request.num_prompt_tokens, request.num_tokens - 1)))


def tier_terms(config: "VllmConfig", tier: TierConfig, model: ModelCaches, element_bytes: int) -> TierTerms | None:
    """None if there are to be no tiers; `CallerError` for models and versions of vLLM that they cannot serve."""
    if not tier.tier_host_bytes:
        return None
    if not (compat.TELLS_WORKER_METADATA and compat.REPORTS_FAILED_REQUESTS):
        # Why both: what workers answer must come back, and a load that failed must never count as loaded.
        raise CallerError(
            f"the host tier needs a vLLM that hears what workers answer and of failed loads by request: "
            f"got={compat.vllm_version()}, supported=0.30 and later"
        )
    parallel = parallel_layout(config)
    shares = [parallel.share_of(rank) for rank in parallel.ranks]
    num_rows = sum(len(share.layers) * len(share.heads) for share in shares)
    bytes_per_token = num_rows * model.num_planes * model.head_size * element_bytes
    num_slots = tier.tier_host_bytes // (bytes_per_token * model.block_size)
    if not num_slots:
        raise CallerError(
            f"tier_host_bytes has no room for a block: got={tier.tier_host_bytes}, "
            f"a block of all ranks={bytes_per_token * model.block_size}"
        )
    return TierTerms(
        tokens_per_block=model.block_size,
        num_slots=num_slots,
        bytes_per_token=bytes_per_token,
        max_tokens=config.model_config.max_model_len,
        num_ranks=len(shares),
        break_even=tier.break_even,
        measured=tier.measured,
        windows=model.windows,
        is_chunked=model.is_chunked,
        has_disk=tier.tier_disk_dir is not None,
        disk_wait_s=tier.tier_disk_wait_s,
        hashes_per_block=model.block_size // compat.hash_block_size(config) if compat.tells_events(config) else 0,
    )


def tier_worker(
    ferry: FerryConfig, terms: TierTerms, state: "CacheState", view: "EngineCaches", on_news: Callable[[], None]
) -> "TierWorker":
    """One rank's half, over its cache tensors; `on_news`: a job has ended."""
    from kv_engine_adapter.hooks import ordered_file_calls
    from kv_engine_adapter.tier_memory import HostMemory
    from kv_engine_adapter.tier_worker import TierWorker
    from kv_transfer.file_mover import FileCalls, PlainFiles
    from kv_transfer.prefix_store.config import StoreConfig
    from kv_transfer.prefix_store.store import PrefixStore

    tier, hooks = ferry.tier, ferry.test_hooks_dir
    memory = HostMemory(
        state, view.caches, terms.tokens_per_block, terms.num_slots, verify=tier.tier_verify, groups=view.groups
    )
    store = None
    if tier.tier_disk_dir is not None:
        directory = StoreConfig(Path(tier.tier_disk_dir), tier.tier_disk_bytes, tokens_per_record=TOKENS_PER_RECORD)
        calls = FileCalls() if hooks is None else ordered_file_calls(hooks)
        store = PrefixStore(directory, state, mover=PlainFiles(calls))
    logger.info(
        "kvferry: host tier: %d blocks of %d tokens, %.1f MB on this rank%s",
        terms.num_slots, terms.tokens_per_block, memory.num_host_bytes / 1e6,
        "" if store is None else f", and disk tier: {tier.tier_disk_bytes / 1e6:.1f} MB in {tier.tier_disk_dir}",
    )  # fmt: skip
    # vLLM's block 0 of every group holds nothing, ever.
    measured = tuple((0,) for _ in range(max(view.groups) + 1)) if tier.measured else ()
    return TierWorker(memory, view.kernel_tables, store, on_news=on_news, measured=measured, groups=view.groups)
