"""Puts the two halves of the connector together when vLLM has what they need.

In:  vLLM's configuration, its KV cache configuration, and (later) its cache tensors or the cards of its ranks.
Out: a `FerryScheduler` or a `FerryWorker`, ready for use.
Law: whatever this version of ours cannot carry is refused here, at start, with its reason; not at the first request.

    worker processes                        scheduler process
    WorkerSetup.start(kv_caches)            SchedulerSetup.start(cards of all ranks)
        -> FerryWorker, card  ------------->    -> FerryScheduler
"""

import dataclasses
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kv_core.errors import CallerError
from kv_core.ids import Incarnation, InstanceId, Rank
from kv_engine_adapter.config import FerryConfig, ferry_config
from kv_engine_adapter.early import EarlyTerms
from kv_engine_adapter.hooks import OrderedFaults
from kv_engine_adapter.scheduler import FerryScheduler, Identity
from kv_engine_adapter.vllm import compat, tensors, translate
from kv_engine_adapter.vllm.codes import Codes, codes_of, refuse_packed
from kv_engine_adapter.vllm.groups import ModelCaches, model_caches, spec_of
from kv_engine_adapter.vllm.tiers import tier_terms, tier_worker
from kv_engine_adapter.worker import FerryWorker
from kv_transfer.config import TransferConfig
from kv_transfer.instance import InstanceDoor
from kv_transfer.plan.cache_state import CacheState, ParallelLayout
from kv_transfer.protocol.messages import RankCard

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kv_engine_adapter.tier_worker import TierWorker

logger = logging.getLogger(__name__)
Number = TypeVar("Number", int, float)


class SchedulerSetup:
    """The scheduler's half, before the ranks have told where they are."""

    def __init__(self, config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        self.model = _caches(kv_cache_config)
        refuse_unsupported(config)
        self._config = config
        self._ferry = ferry_config(_transfer_config(config).kv_connector_extra_config)
        self.tier_terms = tier_terms(config, self._ferry.tier, self.model, _element_bytes(kv_cache_config))

    def start(
        self, cards: Sequence[RankCard], incarnation: Incarnation, workers: Sequence[FerryWorker] = ()
    ) -> FerryScheduler:
        """Open the instance's door; a port in use is an error that names it.

        `workers` are the ranks that live in this very process; if that is all of them, orders need not wait for a step.
        """
        instance = instance_id(self._config)
        settings = _door_settings(self._ferry, self._config)
        door = InstanceDoor(settings, instance, incarnation)
        door.set_cards(cards)
        logger.info("kvferry: instance %s listens at %s:%d for %d ranks", instance, *door.address, len(cards))
        parallel = self._config.parallel_config
        identity = Identity(instance, incarnation, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        shares = bool(self._config.cache_config.enable_prefix_caching)
        return FerryScheduler(
            identity,
            door,
            lease_s=settings.lease_s,
            patience_s=settings.lease_s + settings.request_deadline_s,
            shares_prefixes=shares,
            tokens_per_block=self._config.cache_config.block_size,
            peers=self._ferry.peers,
            early=self._early_terms(settings),
            run_now=workers[0].run_now if len(workers) == len(cards) == 1 else None,
        )

    def _early_terms(self, settings: TransferConfig) -> EarlyTerms | None:
        """None where blocks may not be read while they are computed, since nobody is told when they are taken back."""
        if not compat.TELLS_PREEMPTED or any(self.model.windows):
            return None
        num_in_flight = compat.num_in_flight(self._config)
        return EarlyTerms(settings.max_wait_s, len(self.model.windows), self.model.block_size, num_in_flight)


class WorkerSetup:
    """One rank's half, before its cache tensors exist."""

    def __init__(self, config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        self._model = _caches(kv_cache_config)
        self._config = config
        self._ferry = ferry_config(_transfer_config(config).kv_connector_extra_config)
        self._tier_terms = tier_terms(config, self._ferry.tier, self._model, _element_bytes(kv_cache_config))

    @property
    def idle_wait_s(self) -> float:
        return self._ferry.idle_wait_s

    def start(
        self, kv_caches: Mapping[str, "torch.Tensor"], on_news: Callable[[], None]
    ) -> "tuple[FerryWorker, Incarnation, TierWorker | None]":
        """Open this rank's door over its caches; and its tiers, if there are to be any. `on_news`: a load has ended."""
        from kv_transfer.agent.nixl import NixlConfig, nixl_agent
        from kv_transfer.direct.cuda_ipc import cuda_door
        from kv_transfer.transceiver import Transceiver

        rank, incarnation = own_rank(self._config), shared_incarnation()
        parallel = translate.parallel_layout(self._config)
        codes = codes_of(self._config, kv_caches)
        view = tensors.engine_caches(kv_caches, self._model, parallel.share_of(rank), codes)
        state = self._state(view, parallel, codes)
        hooks = self._ferry.test_hooks_dir
        transceiver = Transceiver(
            _rank_settings(self._ferry, self._config, rank),
            instance_id(self._config),
            incarnation,
            rank,
            state,
            view.caches,
            nixl_agent(NixlConfig(device=view.device)),
            None if hooks is None else OrderedFaults(hooks, state),
            cuda_door(view.caches),
            on_news=on_news,
        )
        tiers = None if self._tier_terms is None else tier_worker(self._ferry, self._tier_terms, state, view, on_news)
        return FerryWorker(transceiver, view.kernel_tables, self._model.block_size), incarnation, tiers

    def _state(self, view: tensors.EngineCaches, parallel: ParallelLayout, codes: Codes | None) -> CacheState:
        """What peers are told of the caches of all ranks."""
        return CacheState(
            fingerprint=translate.fingerprint(self._config),
            attention=self._model.attention,
            dtype=view.dtype,
            head_size=self._model.head_size,
            num_planes=self._model.num_planes,
            num_layers=parallel.num_layers,
            num_kv_heads=parallel.num_kv_heads,
            tokens_per_block=view.caches.tokens_per_block,
            layout=view.layout,
            parallel=msgspec.structs.replace(parallel, blocks_per_deal=view.blocks_per_logical),
            windows=all_windows(self._model, view),
            chunked=self._model.is_chunked,
            scales=_of_all_stages(codes.scales) if codes else (),
            convert_elements=self._ferry.convert_elements,
        )


def log_like_vllm() -> None:
    """Let our loggers write where and how vLLM's write."""
    theirs = logging.getLogger("vllm")
    for name in ("kv_engine_adapter", "kv_transfer"):
        ours = logging.getLogger(name)
        if not ours.handlers:
            ours.handlers, ours.propagate = list(theirs.handlers), not theirs.handlers
            ours.setLevel(theirs.getEffectiveLevel())


def _element_bytes(kv_cache_config: "KVCacheConfig") -> int:
    return int(spec_of(kv_cache_config.kv_cache_groups[0].kv_cache_spec).dtype.itemsize)


def _caches(kv_cache_config: "KVCacheConfig") -> ModelCaches:
    told, mixes = compat.REPORTS_FAILED_REQUESTS, compat.mixes_windows()
    return model_caches(kv_cache_config, can_fail_requests=told, can_mix_windows=mixes)


def all_windows(model: ModelCaches, view: tensors.EngineCaches) -> tuple[int, ...]:
    """The window of every layer of the model; none if no layer has one."""
    if not any(model.windows):
        return ()
    groups = view.caches.groups or (0,) * len(view.caches.layers)
    return _of_all_stages(tuple(model.windows[view.groups[group]] for group in groups))


def _of_all_stages(own: tuple[Number, ...]) -> tuple[Number, ...]:
    """What each stage knows of its own layers, which the stages tell each other, in the order of layers."""
    from vllm.distributed.parallel_state import get_pp_group

    stages = get_pp_group()
    told = [stages.broadcast_object(own, src=stage) for stage in range(stages.world_size)]
    return tuple(number for stage in told for number in stage)


def refuse_unsupported(config: "VllmConfig") -> None:
    """Raise `CallerError` for what the engine may be told to do and we cannot carry."""
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise CallerError(f"FerryConnector does not carry context parallelism: {name}={size}, supported is 1")
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix"):
        raise CallerError(
            f"FerryConnector does not carry the cache of a drafter: speculative method {speculative.method!r}, "
            "supported are ngram and suffix"
        )
    if getattr(parallel, "nnodes", 1) > 1:
        raise CallerError(
            f"FerryConnector does not carry engines on several hosts: nnodes={parallel.nnodes}, supported is 1"
        )
    refuse_packed(config.cache_config)
    _refuse_buffer(config)


def _refuse_buffer(config: "VllmConfig") -> None:
    """`CallerError` if the engine was told to buffer in another memory than its own: staging lies where caches lie."""
    from vllm.platforms import current_platform

    asked, own = str(_transfer_config(config).kv_buffer_device), str(current_platform.device_type)
    if own not in _DEVICES:
        raise CallerError(f"FerryConnector carries caches on {' and '.join(_DEVICES)}: got={own}")
    # Why only this one: versions differ in what they say on a CPU when nobody has asked.
    if asked == "cpu" != own:
        raise CallerError(f"FerryConnector stages where the caches lie: kv_buffer_device={asked}, caches on {own}")


_DEVICES = ("cpu", "cuda")


def prefill_is_complete(request: "Request") -> bool:
    """Whether the request ended by itself, with the KV of its whole prompt in the cache."""
    from vllm.v1.request import RequestStatus

    ended = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
    return ended and request.num_computed_tokens >= request.num_prompt_tokens


def instance_id(config: "VllmConfig") -> InstanceId:
    """The engine's name towards peers; unique for each data-parallel engine."""
    return InstanceId(str(_transfer_config(config).engine_id))


def own_rank(config: "VllmConfig") -> Rank:
    """This process's number: stage * tensor ranks + tensor rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tensor_ranks = config.parallel_config.tensor_parallel_size
    return Rank(get_pp_group().rank_in_group * tensor_ranks + get_tp_group().rank_in_group)


def shared_incarnation() -> Incarnation:
    """A random name of this run, the same in all ranks of the engine."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    # Why in this order: rank 0 tells the first rank of every stage, each of which tells its own stage.
    name = get_pp_group().broadcast_object(secrets.token_hex(16), src=0)
    return Incarnation(get_tp_group().broadcast_object(name, src=0))


def _transfer_config(config: "VllmConfig"):  # type: ignore[no-untyped-def]
    found = config.kv_transfer_config
    assert found is not None, "vLLM makes a connector only when it has a kv_transfer_config"
    return found


def _door_settings(ferry: FerryConfig, config: "VllmConfig") -> TransferConfig:
    return _at_port(ferry.transfer, _first_port(ferry, config))


def _rank_settings(ferry: FerryConfig, config: "VllmConfig", rank: Rank) -> TransferConfig:
    first = _first_port(ferry, config)
    return _at_port(ferry.transfer, first and first + 1 + rank)


def _first_port(ferry: FerryConfig, config: "VllmConfig") -> int:
    """Ports in a row: the door, then one for each rank; then the next data-parallel engine. 0: any free ones."""
    parallel = config.parallel_config
    stride = 1 + parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return ferry.transfer.port and ferry.transfer.port + stride * parallel.data_parallel_index


def _at_port(settings: TransferConfig, port: int) -> TransferConfig:
    return dataclasses.replace(settings, port=port)
