"""The folder that knows vLLM: names of requests, cache tensors, statistics. Needs vLLM, no engine."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import Span
from kv_engine_adapter.idle import IdleSteps
from kv_engine_adapter.metrics import Report
from kv_transfer.plan.cache_state import Share
from kv_transfer.plan.ranges import HOLE

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm]

R = "___prefill_addr_127.0.0.1:8100___decode_addr_127.0.0.1:8200_0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(("request_id", "family"), [
    (f"cmpl-{R}-0-1a2b3c4d", f"cmpl-{R}"), (f"cmpl-{R}-11-ffffffff", f"cmpl-{R}"),
    (f"2_cmpl-{R}-0-1a2b3c4d", f"cmpl-{R}"), (f"chatcmpl-{R}-1a2b3c4d", f"chatcmpl-{R}"),
    (f"1_chatcmpl-{R}-1a2b3c4d", f"chatcmpl-{R}"), ("0-b9f71623", "0"),
])  # fmt: skip
def test_requests_of_one_call_are_one_family(request_id, family):
    from kv_engine_adapter.vllm.translate import request_family

    assert request_family(request_id) == family


@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_what_vllms_cpu_op_writes_is_read_as_tokens(isa):
    from vllm import _custom_ops as ops

    from kv_engine_adapter.vllm.groups import ModelCaches
    from kv_engine_adapter.vllm.tensors import engine_caches

    tokens, heads, size, blocks = (32, 2, 64, 3) if isa == "vec" else (16, 2, 80, 3)
    spec = ModelCaches(heads, size, tokens)
    cache = torch.zeros(blocks, heads, tokens, 2 * size)
    halves = cache.view(blocks, heads, 2 * tokens, size).chunk(2, dim=2)
    key, value = (torch.randn(tokens, heads, size) for _ in range(2))
    slots = torch.arange(tokens, 2 * tokens)
    ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")
    view = engine_caches({"model.layers.0.self_attn.attn": cache}, spec, Share(Rank(0), Span(0, 1), Span(0, heads)))
    assert torch.equal(view.caches.planes[0][1], key)
    assert torch.equal(view.caches.planes[1][1], value)
    assert not view.caches.planes[0][0].any()
    assert view.kernel_tables(((4, HOLE, 1),)) == ((4, HOLE, 1),)


def test_a_drafters_layer_does_not_take_the_place_of_the_models():
    from kv_engine_adapter.vllm.groups import ModelCaches
    from kv_engine_adapter.vllm.tensors import engine_caches

    spec = ModelCaches(2, 64, 32)
    caches = {f"{prefix}model.layers.0.self_attn.attn": torch.zeros(3, 2, 32, 128) for prefix in ("", "draft_model.")}
    with pytest.raises(CallerError, match="layer number 0"):
        engine_caches(caches, spec, Share(Rank(0), Span(0, 1), Span(0, 2)))


def test_a_tensor_of_unknown_shape_is_refused_with_its_shape():
    from kv_engine_adapter.vllm.groups import ModelCaches
    from kv_engine_adapter.vllm.tensors import engine_caches

    spec = ModelCaches(2, 64, 32)
    with pytest.raises(CallerError, match=r"3, 5, 7"):
        engine_caches({"model.layers.0.attn": torch.zeros(3, 5, 7)}, spec, Share(Rank(0), Span(0, 1), Span(0, 2)))


def test_our_report_is_found_alone_and_among_the_children_of_multi_connector():
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

    from kv_engine_adapter.vllm.stats import FerryStats, own_report

    report = Report(counters={"loads": 2.0}, gauges={"rank0": {"sessions": 1.0}})
    ours = FerryStats(dict(report))
    assert own_report(ours) == report
    assert own_report(MultiKVConnectorStats(data={"FerryConnector": ours})) == report
    nothing = Report(counters={}, gauges={})
    assert own_report(MultiKVConnectorStats(data={"OtherConnector": ours})) == nothing
    assert own_report(None) == nothing


def test_series_of_transfers_are_served_by_engine():
    """Also for a host that has no connector of ours in its report."""
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from kv_engine_adapter.vllm.stats import FerryPromMetrics

    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    served = FerryPromMetrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    report = Report(
        counters={"loads": 2.0, "transfer_bytes|load|direct": 4096.0, "unheard|of": 1.0},
        gauges={"rank0": {"threads_troubled": 1.0}},
        samples={"seconds|load|wire": [0.004, 0.2], "seconds|load|unheard": [1.0]},
    )
    served.observe(dict(report), 1)
    ours, value = {"model_name": "m", "engine": "1"}, registry.get_sample_value
    assert value("kvferry:loads_total", ours) == 2
    assert value("kvferry:threads_troubled", ours) == 1
    assert value("kvferry:transfer_bytes_total", {**ours, "direction": "load", "path": "direct"}) == 4096
    wire = {**ours, "direction": "load", "stage": "wire"}
    assert value("kvferry:transfer_seconds_count", wire) == 2
    assert value("kvferry:transfer_seconds_sum", wire) == pytest.approx(0.204)
    assert value("kvferry:transfer_seconds_bucket", {**wire, "le": "0.005"}) == 1
    assert value("kvferry:transfer_seconds_count", {**wire, "engine": "0"}) == 0


def test_the_connector_is_registered_once_and_found_by_name():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

    from kv_engine_adapter.vllm import compat, plugin

    plugin.register()
    plugin.register()
    found = KVConnectorFactory.get_connector_class_by_name("FerryConnector")
    assert found.__name__ == "FerryConnector"
    assert supports_hma(found) is compat.REPORTS_FAILED_REQUESTS


def test_the_calm_server_finds_what_it_replaces():
    """Else two engines of several ranks on the same cores hang in their first reduction, and nothing says why."""
    import vllm.v1.engine.utils
    import vllm.v1.executor.multiproc_executor
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.utils import system_utils

    for starts in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
        assert starts.get_mp_context is system_utils.get_mp_context
    asked = "_all_group_ranks_share_shm_group_name"
    assert asked in vars(CpuCommunicator)
    assert asked in CpuCommunicator.__init__.__code__.co_names


PROMPT = tuple(range(40))


def key_of(**fields):
    """The prompt key of a request of vLLM, as far as a key is made of it."""
    from kv_engine_adapter.vllm.translate import RequestView

    usual = {"prompt_token_ids": PROMPT, "prompt_embeds": None, "lora_request": None, "cache_salt": None}
    return RequestView(SimpleNamespace(**(usual | {"mm_features": None} | fields))).prompt_key()


def item(name, offset, length=4):
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))


def test_a_prompts_key_covers_all_that_decides_its_cache():
    """What vLLM's own block hashes cover: tokens, salt, multimodal items with their places."""
    variants = {
        "plain": key_of(),
        "other tokens": key_of(prompt_token_ids=PROMPT[::-1]),
        "salt": key_of(cache_salt="tenant 1"),
        "other salt": key_of(cache_salt="tenant 2"),
        "item": key_of(mm_features=[item("cat", 4)]),
        "other item": key_of(mm_features=[item("dog", 4)]),
        "item elsewhere": key_of(mm_features=[item("cat", 12)]),
        "two items": key_of(mm_features=[item("cat", 4), item("dog", 12)]),
        "two items exchanged": key_of(mm_features=[item("dog", 4), item("cat", 12)]),
        "item and salt": key_of(mm_features=[item("cat", 4)], cache_salt="tenant 1"),
    }
    assert all(isinstance(key, bytes) for key in variants.values())
    assert len(set(variants.values())) == len(variants)
    assert variants["item"] == key_of(mm_features=[item("cat", 4)]), "equal prompts have equal keys"
    assert variants["plain"] == key_of(mm_features=[])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"lora_request": SimpleNamespace(lora_name="poet")}, "it uses the LoRA adapter 'poet'"),
        ({"prompt_embeds": torch.zeros(1)}, "it has no token ids"),
        ({"prompt_token_ids": None}, "it has no token ids"),
    ],
)
def test_prompts_that_no_key_can_name_are_not_offered(fields, why):
    assert why in key_of(**fields)


def test_a_step_that_loads_is_told_apart_and_waited_for():
    """By the names that vLLM gives to it; versions without them are taken to load in every step."""
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

    from kv_engine_adapter.vllm import compat

    output = SchedulerOutput.make_empty()
    assert not compat.may_load(output)
    output.has_sync_kv_loads = True
    assert compat.may_load(output)
    assert compat.may_load(SimpleNamespace())
    assert isinstance(VllmConfig.max_concurrent_batches, property)
    assert compat.num_in_flight(SimpleNamespace(max_concurrent_batches=3)) == 3
    assert compat.num_in_flight(SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2))) == 3


def test_what_other_connectors_load_and_lose_is_heard_by_early_offers():
    from unittest.mock import Mock

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    from kv_engine_adapter.vllm.connector import FerryConnector

    connector = object.__new__(FerryConnector)
    connector._scheduler, connector._windows, connector._tiers = Mock(), Mock(), None
    connector._idle = IdleSteps(is_alone=True)
    early = connector._scheduler.early = Mock(__bool__=lambda self: False)
    output = SchedulerOutput.make_empty()
    for output.has_sync_kv_loads in (False, True):
        connector.build_connector_meta(output)
        early.stepped.assert_called_with((), (), may_load=output.has_sync_kv_loads)
    connector.update_connector_output(KVConnectorOutput(invalid_block_ids={5, 8}))
    early.blocks_lost.assert_called_once_with({5, 8})


def test_a_step_that_computes_nothing_waits_for_loads_alone():
    from unittest.mock import Mock

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    from kv_engine_adapter.vllm.connector import FerryConnector
    from kv_engine_adapter.vllm.tiers import NO_RATES

    connector = object.__new__(FerryConnector)
    connector._scheduler, connector._windows, connector._tiers = Mock(), Mock(), None
    connector._scheduler.early = Mock(__bool__=lambda self: False)
    connector._idle = IdleSteps(is_alone=True)
    connector._worker, connector._tier_worker, connector._idle_wait = (worker := Mock()), None, (wait := Mock())
    output, waits = SchedulerOutput.make_empty(), []

    def step(num_tokens, *, is_loading):
        output.total_num_scheduled_tokens, worker.is_loading = num_tokens, is_loading
        connector._connector_metadata = connector.build_connector_meta(output)
        connector._poll()
        waits.append(wait.wait.call_args.kwargs["is_worth"])

    step(0, is_loading=False)
    step(0, is_loading=True)
    step(7, is_loading=True)
    step(0, is_loading=True)
    connector.update_connector_output(KVConnectorOutput())
    step(0, is_loading=True)
    connector._tier_answers, connector._tier_rates = (), NO_RATES
    connector._tier_worker = Mock(is_awaited=True, poll=Mock(return_value=Mock(answers=(), rates=None)))
    step(0, is_loading=False)
    assert waits == [False, True, False, False, True, True]


def test_a_prompt_may_wait_longer_for_its_turn_than_a_lease_lasts():
    from kv_engine_adapter.vllm import compat
    from kv_engine_adapter.vllm.groups import ModelCaches
    from kv_engine_adapter.vllm.setup import SchedulerSetup
    from kv_transfer.config import TransferConfig

    half = object.__new__(SchedulerSetup)
    vars(half).update(model=ModelCaches(2, 64, 16), _config=SimpleNamespace(max_concurrent_batches=2))
    assert compat.TELLS_PREEMPTED
    terms = half._early_terms(TransferConfig(max_wait_s=900.0, max_lease_s=60.0))
    assert terms is not None
    assert tuple(terms) == (900.0, 1, 16, 2)
