"""One manager under test, and what the cases say of its requests.

In:  the `config` of a scenario.
Out: our manager with a clock that is turned by hand, its pools, and what both sides have said so far.
Law: where the cases list a detached block, its last id is remembered here.
"""

from collections.abc import Iterable
from typing import Any

from contract.memory import TaggedMemory
from contract.notnow import NotNow
from contract.requests import CaseRequest, scope_of
from kv_core.config import CacheType, ManagerConfig, WindowConfig
from kv_core.forecast import limits, progress, prospect
from kv_core.ids import RequestId
from kv_core.layout import IndexSpec, cache_pools
from kv_core.manager import KVCacheManager
from kv_core.pins import Pin
from kv_core.request import Request
from kv_core.scheduling import Progress
from kv_core.sizing import temporary_window
from kv_core.spec import CacheSpec, LayerSpec
from kv_core.tiers import Place, Tier

Step = dict[str, Any]
Answer = dict[str, Any]

DTYPES = {
    "half": "float16",
    "float": "float32",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "int8": "int8",
    "fp4": "uint8",
}


class FixedMatch:
    """An external cache that always has this many tokens more."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def num_matched_tokens(self, request: Request, num_cached: int) -> int:
        return self._num_tokens


class ManagerState:
    """What all operations share."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._now_ms = 0
        self._build()

    def _build(self) -> None:
        matched = self._config.get("connector_matched_tokens")
        external = None if matched is None else FixedMatch(matched)
        self._manager = KVCacheManager(manager_config(self._config), clock_ms=lambda: self._now_ms, external=external)
        self._pools = cache_pools_of(self._config)
        self._windows = [one.window for one in self._manager.config.windows]
        self._requests: dict[int, CaseRequest] = {}
        self._pins: list[Pin] = []
        self._memory = TaggedMemory(self._config["tokens_per_block"])
        self._dry_run = self._manager.dry_run()

    # Helpers.

    def _one(self, step: Step) -> CaseRequest:
        return self._requests[step["request_id"]]

    def _window(self, step: Step) -> int:
        return int(step.get("window", self._windows[0]))

    def _place(self, step: Step) -> Place:
        view = self._manager.inspect(self._window(step), step["block_id"])
        return Place(self._window(step), Tier(view.tier), view.slot)

    def _asked(self, step: Step) -> Request:
        extra_ids = step.get("extra_ids")
        return Request(RequestId("asked"), step["tokens"], scope_of(step), extra_ids=extra_ids)

    def _told(self, one: CaseRequest, tokens: list[int]) -> None:
        one.tokens += tokens
        self._manager.extend(name_of(one), tokens)

    def _grow(self, one: CaseRequest) -> None:
        self._remember(one)
        if not self._manager.grow(name_of(one)):
            raise NotNow("add_token")
        self._remember(one)

    def _limits(self, window: int) -> Any:
        inputs = self._config.get("temp_attention_window_inputs")
        extra = 0
        if inputs and inputs["paged_context_fmha"]:
            extra = temporary_window(window, inputs["max_input_len"], inputs["max_num_tokens"])
        return limits(self._manager, window, extra)

    def _progress(self, one: CaseRequest, window: int) -> Progress:
        if one.admission is not None:
            return progress(self._manager, name_of(one), window, one.phase)
        return prospect(self._manager, one.request(self._config["cache_type"]), window, one.phase)

    def _remember(self, one: CaseRequest) -> None:
        for window in self._windows:
            for beam in range(one.beam_width):
                now = self._manager.block_ids(name_of(one), window, beam)
                before: list[int | None] = one.listed.get((window, beam), [])
                seen = before + [None] * (len(now) - len(before))
                one.listed[window, beam] = [seen[at] if it is None else it for at, it in enumerate(now)]

    def _table(self, one: CaseRequest) -> Answer:
        self._remember(one)
        by_window = {}
        for window in self._windows:
            beams = [one.listed[window, beam] for beam in range(one.beam_width)]
            by_window[str(window)] = beams[0] if one.beam_width == 1 else beams
        return {"block_ids": by_window if len(by_window) > 1 else next(iter(by_window.values()))}


def name_of(one: CaseRequest) -> RequestId:
    return RequestId(str(one.request_id))


def manager_config(config: dict[str, Any]) -> ManagerConfig:
    """Ours for a case's."""
    windows = sorted((int(window), counts) for window, counts in config["blocks_per_window"].items())
    threshold = config.get("secondary_offload_min_priority")
    return ManagerConfig(
        tokens_per_block=config["tokens_per_block"],
        windows=tuple(WindowConfig(window, *counts) for window, counts in windows),
        max_sequence_length=config["max_sequence_length"],
        max_beam_width=config["max_beam_width"],
        cache_type=CacheType(config["cache_type"]),
        reuse=config["enable_block_reuse"],
        partial_reuse=config["enable_partial_reuse"],
        copy_on_partial=config["copy_on_partial_reuse"],
        onboard=config["onboard_blocks"],
        offload_min_priority=30 if threshold is None else threshold,
        event_buffer_size=config.get("event_buffer_max_size") or 0,
    )


def cache_pools_of(config: dict[str, Any]) -> Any:
    """Pools of a case's model."""
    heads = config.get("num_kv_heads_per_layer") or [config["num_kv_heads"]] * config["num_layers"]
    windows = config["max_attention_window_vec"]
    planes = 1 if config["cache_type"] == "self_k_only" else 2
    dtype = DTYPES[config["dtype"]]
    layers: Iterable[LayerSpec] = (
        LayerSpec(count, config["size_per_head"], planes, dtype, windows[at % len(windows)])
        for at, count in enumerate(heads)
    )
    index = config.get("indexer_k_cache")
    return cache_pools(
        CacheSpec(tuple(layers), config["tokens_per_block"]),
        fp4=config["dtype"] == "fp4",
        index=None if index is None else IndexSpec(index["index_head_dim"], index.get("quant_block_size", 128)),
    )
