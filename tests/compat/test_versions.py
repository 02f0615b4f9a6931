"""Every vLLM we say we support has what the adapter takes from it, under the names and with the parameters it expects.

Read from the sources of the published wheels, the oldest and the newest that we support; nothing is run. What the
installed version does is seen end to end.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from environment.vllm_sources import sources_of

import kv_engine_adapter.vllm
from kv_testing.syntax import Imported, Source, attributes, is_decorated, methods, module_at, parameters

pytestmark = pytest.mark.compat

OLDEST, NEWEST = "0.25.1", "0.33.0"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
OURS = Path(next(iter(kv_engine_adapter.vllm.__path__)))
LATER_HOOKS = {"bind_kv_cache_manager", "get_transfer_results", "has_pending_block_frees"}
"""Hooks of ours that the oldest version does not call; the connector does without them there."""
READ = {
    ("vllm.v1.request", "Request"): {
        "request_id", "kv_transfer_params", "num_prompt_tokens", "prompt_token_ids", "lora_request", "cache_salt",
        "mm_features", "num_computed_tokens", "status", "block_hashes",
    },
    ("vllm.v1.request", "RequestStatus"): {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"},
    ("vllm.v1.outputs", "KVConnectorOutput"): {
        "finished_sending", "finished_recving", "invalid_block_ids", "kv_connector_stats",
    },
    ("vllm.v1.core.sched.output", "SchedulerOutput"): {
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "preempted_req_ids",
    },
    ("vllm.v1.core.sched.output", "NewRequestData"): {"req_id", "num_computed_tokens", "block_ids"},
    ("vllm.v1.core.sched.output", "CachedRequestData"): {"req_ids", "num_computed_tokens", "new_block_ids"},
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"): {"get_block_ids", "blocks"},
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager"): {"get_blocks", "block_pool"},
    ("vllm.v1.core.block_pool", "BlockPool"): {"touch", "free_blocks"},
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlock"): {"block_id", "is_null"},
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec"): {"layer_names", "kv_cache_spec"},
    ("vllm.v1.kv_cache_interface", "SlidingWindowSpec"): {"sliding_window"},
    ("vllm.v1.kv_cache_interface", "ChunkedLocalAttentionSpec"): {"attention_chunk_size"},
    ("vllm.v1.kv_cache_interface", "MLAAttentionSpec"): {"cache_dtype_str"},
    ("vllm.v1.kv_cache_interface", "AttentionSpec"): {"kv_quant_mode"},
    ("vllm.v1.kv_cache_interface", "KVQuantMode"): {"NONE", "FP8_PER_TENSOR"},
    ("vllm.v1.attention.backend", "AttentionLayer"): {"_k_scale", "_v_scale", "_k_scale_float", "_v_scale_float"},
    ("vllm.model_executor.layers.attention.attention", "Attention"): {"kv_cache_dtype"},
    ("vllm.config.compilation", "CompilationConfig"): {"static_forward_context"},
    ("vllm.config.cache", "CacheConfig"): {"cache_dtype"},
    ("vllm.platforms.interface", "Platform"): {"is_fp8_fnuz"},
    ("vllm.config.model", "ModelConfig"): {"use_mla"},
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): {"kv_cache_groups"},
}  # fmt: skip
"""Attributes that the adapter reads of vLLM's objects."""


@pytest.fixture(scope="module", params=[OLDEST, NEWEST])
def theirs(request) -> Path:
    return sources_of(request.param)


def test_all_that_is_imported_is_there(theirs):
    missing = [each for each in _imported() if not each.is_guarded and not _is_there(theirs, each)]
    assert not missing


def test_what_may_be_absent_is_in_the_newest():
    guarded = [each for each in _imported() if each.is_guarded]
    assert guarded
    assert all(_is_there(sources_of(NEWEST), each) for each in guarded)


def test_every_hook_is_called_as_ours_is_written(theirs):
    base, ours = methods(_base(theirs)), _hooks()
    differ = {
        name: (parameters(hook), parameters(base[name]))
        for name, hook in ours.items()
        if name in base and parameters(hook) != parameters(base[name])
    }
    assert not differ
    absent = {name for name in ours if name not in base}
    # This one belongs to another base class.
    assert absent - {"request_finished_all_groups"} == (LATER_HOOKS if theirs.name == OLDEST else set())


def test_the_hook_of_all_groups_is_called_as_ours_is_written(theirs):
    source = module_at(theirs, BASE)
    hook = methods(source.class_named("SupportsHMA"))["request_finished_all_groups"]
    assert parameters(hook) == parameters(_hooks()["request_finished_all_groups"])


def test_whatever_must_be_implemented_is(theirs):
    demanded = {name for name, method in methods(_base(theirs)).items() if is_decorated(method, "abstractmethod")}
    assert demanded
    assert demanded <= set(_hooks())


@pytest.mark.parametrize("place", READ, ids=".".join)
def test_attributes_that_are_read_are_there(theirs, place):
    module, name = place
    source = module_at(theirs, module)
    assert source is not None, module
    assert READ[place] <= attributes(source.class_named(name))


def test_a_name_that_is_not_there_is_found(theirs):
    assert not _is_there(theirs, Imported(BASE, "KVConnectorBase_V9", is_guarded=False))
    assert not _is_there(theirs, Imported("vllm.nowhere", "anything", is_guarded=False))


def _imported() -> Iterator[Imported]:
    return (each for file in sorted(OURS.glob("*.py")) for each in Source(file).imported_from("vllm"))


def _is_there(folder: Path, wanted: Imported) -> bool:
    source = module_at(folder, wanted.module)
    return source is not None and (wanted.name in source.names or _is_module(folder, wanted))


def _is_module(folder: Path, wanted: Imported) -> bool:
    return module_at(folder, f"{wanted.module}.{wanted.name}") is not None


def _base(folder: Path):
    source = module_at(folder, BASE)
    assert source is not None
    return source.class_named("KVConnectorBase_V1")


def _hooks():
    """The methods of the connector that vLLM may call."""
    found = methods(Source(OURS / "connector.py").class_named("FerryConnector"))
    return {name: method for name, method in found.items() if not name.startswith("_")}
