"""`FerryConnector`: vLLM's KV connector interface on one side, our scheduler and worker halves on the other.

Law: this class only delegates. What vLLM may call before any instance exists (class methods) imports nothing heavy.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kv_core.errors import CallerError
from kv_engine_adapter.idle import IdleSteps, IdleWait
from kv_engine_adapter.metrics import Report, merged
from kv_engine_adapter.orders import StepOrders
from kv_engine_adapter.tier_orders import Answer, TierOrders, slowest, tallied
from kv_engine_adapter.vllm import compat, setup
from kv_engine_adapter.vllm.stats import FerryPromMetrics, FerryStats, own_report
from kv_engine_adapter.vllm.tiers import NO_RATES, SchedulerTiers, TierMetadata
from kv_engine_adapter.vllm.translate import RequestView, block_tables, may_want_load, scheduled_requests
from kv_engine_adapter.vllm.window_blocks import WindowBlocks

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kv_core.ids import Incarnation
    from kv_engine_adapter.scheduler import FerryScheduler
    from kv_engine_adapter.tier_worker import TierWorker
    from kv_engine_adapter.worker import Ended, FerryWorker
    from kv_transfer.protocol.messages import RankCard

logger = logging.getLogger(__name__)


@dataclass
class FerryMetadata(KVConnectorMetadata):
    """One step's orders, in the envelope vLLM carries."""

    orders: StepOrders
    tiers: TierOrders = field(default_factory=TierOrders)
    may_wait: bool = False
    """The step computes nothing, so its end may wait a moment for loads."""


@dataclass
class FerryHandshake(KVConnectorHandshakeMetadata):
    """A rank's card, on its way from the worker to the scheduler process."""

    card: "RankCard"
    incarnation: "Incarnation"
    worker: "FerryWorker | None" = None
    """The rank itself, where worker and scheduler share a process; lost on the way to another one."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"worker": None}


class FerryConnector(*compat.CONNECTOR_BASES):  # type: ignore[misc]
    """Carries KV between vLLM engines; enabled by `"kv_connector": "FerryConnector"`."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        setup.log_like_vllm()
        if not compat.REPORTS_FAILED_REQUESTS:
            logger.warning(
                "vLLM %s cannot be told of a failed load by request, so FerryConnector does not support its hybrid KV "
                "cache manager; vLLM 0.30 and later can", compat.vllm_version()
            )  # fmt: skip
        self._scheduler: FerryScheduler | None = None
        self._worker: FerryWorker | None = None
        self._tiers: SchedulerTiers | None = None
        self._tier_worker: TierWorker | None = None
        self._tier_answers: tuple[Answer, ...] = ()
        self._tier_rates = NO_RATES
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_setup = setup.SchedulerSetup(vllm_config, kv_cache_config)
            self._windows = WindowBlocks(self._scheduler_setup.model)
            self._idle = IdleSteps(is_alone=vllm_config.parallel_config.data_parallel_size == 1)
            terms = self._scheduler_setup.tier_terms
            self._tiers = None if terms is None else SchedulerTiers(terms)
        else:
            self._worker_setup = setup.WorkerSetup(vllm_config, kv_cache_config)
            self._idle_wait = IdleWait(self._worker_setup.idle_wait_s)

    @property
    def _scheduling(self) -> "FerryScheduler":
        assert self._scheduler is not None, "requests come only after the cards of all ranks"
        return self._scheduler

    @property
    def _working(self) -> "FerryWorker":
        assert self._worker is not None, "steps come only after the cache tensors"
        return self._worker

    # -- scheduler side ------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._windows.bind(kv_cache_manager)
        if self._tiers is not None:
            self._tiers.bind(kv_cache_manager)

    def on_new_request(self, request: "Request") -> None:
        # Versions of vLLM without this hook tell of a request when its turn comes.
        if request.kv_transfer_params:
            view = RequestView(request)
            self._scheduling.announced(view)
            self._scheduling.early.announced(view)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        # Why no view at first: this is asked for every waiting request in every step.
        wanted = self._num_of_peer(request, num_computed_tokens) if request.kv_transfer_params else 0
        if self._tiers is not None:
            wanted = self._tiers.num_tokens(request, num_computed_tokens, wanted)
        return wanted, bool(wanted)

    def _num_of_peer(self, request: "Request", num_computed_tokens: int) -> int | None:
        scheduling, name = self._scheduling, request.request_id
        if not scheduling.knows(name):
            if not may_want_load(request.kv_transfer_params):
                return 0
            scheduling.announced(RequestView(request))
        return scheduling.num_known_tokens(name, request.num_prompt_tokens, num_computed_tokens)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[Any, int]:
        found = None if self._tiers is None else self._tiers.prefixes.sources(request.request_id)
        if found is None:
            return compat.hit_sources(p2p=num_external_tokens)
        return compat.hit_sources(host=found.num_host, disk=found.num_disk)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        # Why the tables only now and then: they are long, and most requests load nothing.
        tables = block_tables(blocks.get_block_ids()) if num_external_tokens else ()
        from_tiers = self._tiers is not None and self._tiers.prefixes.allocated(
            request.request_id, tables, num_external_tokens
        )
        view = RequestView(request)
        if self._tiers is not None:
            self._tiers.allocated(view)
        if not request.kv_transfer_params:
            return
        if view.is_prefill:
            self._windows.watch(view.request_id, view.num_prompt_tokens)
        if not from_tiers:
            self._scheduling.allocated(view, tables, num_external_tokens)
        self._scheduling.early.announced(view)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        preempted = compat.preempted(scheduler_output)
        self._windows.keep(preempted)
        early = self._scheduling.early
        scheduled = scheduled_requests(scheduler_output, early) if early else ()
        early.stepped(scheduled, preempted, may_load=compat.may_load(scheduler_output))
        tiers = TierOrders()
        if self._tiers is not None:
            # Why first: what is ordered of this step is copied with the next one, when it has been computed.
            tiers = self._tiers.prefixes.take_orders()
            self._tiers.step_began(scheduler_output)
        may_wait = self._idle.begins(computes=scheduler_output.total_num_scheduled_tokens > 0)
        return FerryMetadata(self._scheduling.take_orders(), tiers, may_wait)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._idle.ends()
        failed = getattr(connector_output, "failed_recving", None) or ()
        failed_blocks = connector_output.invalid_block_ids or ()
        self._scheduling.loads_over(connector_output.finished_recving or (), failed, failed_blocks)
        self._scheduling.early.blocks_lost(failed_blocks)
        self._scheduling.sends_over(connector_output.finished_sending or ())
        for request_id in connector_output.finished_sending or ():
            self._windows.forget(request_id)
        if self._tiers is not None:
            self._tiers.update(connector_output)
        self._scheduling.workers_report(own_report(connector_output.kv_connector_stats)["gauges"])

    def has_pending_push_work(self) -> bool:
        if self._tiers is not None and self._tiers.prefixes.has_work():
            return True
        return self._scheduler is not None and self._scheduler.has_work()

    def has_pending_block_frees(self) -> bool:
        return self._tiers is not None and self._tiers.has_pending_frees()

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return () if self._tiers is None else self._tiers.take_events()

    def reset_cache(self) -> bool | None:
        if self._tiers is None:
            return None
        self._tiers.prefixes.reset()
        return True

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        view, is_kept = RequestView(request), bool(request.kv_transfer_params or self._tiers is not None)
        tables = block_tables(block_ids) if is_kept else ()
        full, complete = None, setup.prefill_is_complete(request)
        if complete and view.is_prefill:
            full = self._windows.completed(view.request_id, view.num_prompt_tokens, tables)
            if full is None:
                logger.warning("kvferry: request %s is not offered: its windows have moved on", view.request_id)
        keeps, params = self._scheduling.finished(view, full or tables, complete=full is not None)
        if not keeps:
            self._windows.forget(view.request_id)
        if self._tiers is not None:
            self._tiers.finished(request, tables)
        return keeps, params

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): meta for rank, meta in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        # Why filtered: under MultiConnector every child is handed the metadata of the first child that has any.
        ours = [meta for meta in metadata.values() if isinstance(meta, FerryHandshake)]
        if metadata and not ours:
            kinds = sorted({type(meta).__name__ for meta in metadata.values()})
            raise CallerError(f"another connector answers for this engine's ranks ({kinds}): list FerryConnector first")
        if ours:
            workers = [meta.worker for meta in ours if meta.worker is not None]
            self._scheduler = self._scheduler_setup.start([meta.card for meta in ours], ours[0].incarnation, workers)

    # -- worker side ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        self._worker, self._incarnation, self._tier_worker = self._worker_setup.start(kv_caches, self._idle_wait.tell)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self._worker is None else FerryHandshake(self._worker.card, self._incarnation, self._worker)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        # Why here: some versions call `start_load_kv` only after the step, which may use blocks that were taken back.
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, FerryMetadata) and self._worker is not None:
            self._worker.hear(connector_metadata.orders)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        metadata = self._connector_metadata
        if isinstance(metadata, FerryMetadata):
            self._working.run(metadata.orders)
            if self._tier_worker is not None:
                self._tier_worker.run(metadata.tiers)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps, so there is nothing to wait for inside one."""

    def save_kv_layer(self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are read after the request has finished, under an offer; nothing is saved layer by layer."""

    def wait_for_save(self) -> None:
        """See `save_kv_layer`."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> compat.TransferResults:
        done = self._poll()
        return compat.TransferResults(done.sent, done.received, done.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done = self._poll()
        return done.sent or None, done.received or None

    def _poll(self) -> "Ended":
        self._idle_wait.wait(is_worth=self._is_worth_waiting())
        done = self._working.poll()
        if self._tier_worker is not None:
            tiers = self._tier_worker.poll()
            done.received.update(tiers.received)
            done.failed.update(tiers.failed)
            self._tier_answers += tiers.answers
            self._tier_rates = slowest(self._tier_rates, tiers.rates or NO_RATES)
        return done

    def _is_worth_waiting(self) -> bool:
        """Whether this step computes nothing, and a request waits for a load."""
        metadata, tiers = self._connector_metadata, self._tier_worker
        may_wait = isinstance(metadata, FerryMetadata) and metadata.may_wait
        return may_wait and (self._working.is_loading or (tiers is not None and tiers.is_awaited))

    def build_connector_worker_meta(self) -> TierMetadata | None:
        answers, self._tier_answers = self._tier_answers, ()
        rates, self._tier_rates = self._tier_rates, NO_RATES
        return TierMetadata(tallied(answers), rates) if answers or rates != NO_RATES else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        # Versions that are told failed requests by id must not be told of the blocks as well.
        return set() if compat.REPORTS_FAILED_REQUESTS else self._working.take_failed_blocks()

    # -- both ----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> FerryStats | None:
        prefixes = None if self._tiers is None else self._tiers.prefixes
        if self._tiers is not None:
            # Why here: vLLM asks the scheduler's half once at the end of every step, whatever its workers had to say.
            self._tiers.step_ended()
        halves = self._worker or self._scheduler, self._tier_worker or prefixes
        reports: list[Report] = [report for half in halves if half is not None and (report := half.take_report())]
        if not reports:
            return None
        whole = reports[0] if len(reports) == 1 else merged(*reports)
        return FerryStats(dict(whole))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        return FerryStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FerryPromMetrics:
        return FerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for half in (self._tier_worker, self._worker, self._scheduler):
            if half is not None:
                half.close()
