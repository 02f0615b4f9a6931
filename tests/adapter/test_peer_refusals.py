"""What vLLM's NixlConnector refuses (docs/decisions/peer-refusals.md), as our adapter meets it: at start.

Every test is named after its row. What is refused is refused before a door is opened, with what was got and what is
supported; the rows that we carry as shapes are in tests/transfer/sessions/test_peer_refusals.py. Needs vLLM, no engine.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.exchanges import hand_over, small_state
from kv_testing.tagged import empty, make_world
from kv_testing.worlds import NUM_TOKENS, make_side, sides
from kv_transfer.agent import nixl
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.plan.cache_state import BlockLayout, Share

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm]

BF16 = torch.bfloat16
USUAL = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": BF16}


def spec(kind, **fields):
    """A specification of vLLM's, by the name of its class."""
    from vllm.v1 import kv_cache_interface

    return getattr(kv_cache_interface, kind)(**(USUAL | fields))


def mamba(**fields):
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(**({"block_size": 16, "shapes": ((4, 8), (2, 3)), "dtypes": (BF16, torch.float32)} | fields))


def model_of(*specs):
    """A KV cache configuration with a group for each specification."""
    groups = [SimpleNamespace(kv_cache_spec=each) for each in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def engine(**changes):
    """As much of vLLM's configuration as is looked at before the model's cache is."""
    parts = {
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1, nnodes=1),
        "speculative_config": None,
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "kv_transfer_config": SimpleNamespace(kv_buffer_device="cpu", kv_connector_extra_config={}),
    }
    return SimpleNamespace(**(parts | changes))


def parallel(**changes):
    return SimpleNamespace(
        **({"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "nnodes": 1} | changes)
    )


def refusal(model, config=None):
    """What both halves of the connector say of this model; their doors stay closed."""
    from kv_engine_adapter.vllm.setup import SchedulerSetup, WorkerSetup

    said = set()
    for half in (SchedulerSetup, WorkerSetup):
        with pytest.raises(CallerError) as refused:
            half(config or engine(), model)
        said.add(str(refused.value))
    assert len(said) == 1, said
    return said.pop()


def groups_refused(*specs):
    """The reason is the groups: which were got, and what is supported."""
    kinds = [type(each).__name__ for each in specs]
    assert f"got={kinds}, supported=any of ['FullAttentionSpec', " in refusal(model_of(*specs))


def test_the_usual_model_and_engine_are_not_refused():
    """Negative control."""
    from kv_engine_adapter.vllm.setup import SchedulerSetup, WorkerSetup

    for half in (SchedulerSetup, WorkerSetup):
        half(engine(), model_of(spec("FullAttentionSpec")))


# -- recurrent states, and layers that share their pages with them -----------------------------------------------------


def csa_linear():
    """The groups of a model with compressed sparse and linear attention: latent rows, a ring, a replicated state."""
    latent = spec("MLAAttentionSpec", num_kv_heads=1)
    return latent, spec("CircularBufferSpec", num_kv_heads=1), mamba(tp_replicated=True)


def test_row_06_compressed_and_linear_attention_with_two_owners():
    groups_refused(*csa_linear(), mamba(tp_replicated=True))


def test_row_07_recurrent_states():
    groups_refused(spec("FullAttentionSpec"), mamba())
    groups_refused(mamba())


@pytest.mark.parametrize("stages", [2, 4])
def test_row_09_recurrent_states_over_stages(stages):
    config = engine(parallel_config=parallel(pipeline_parallel_size=stages))
    assert "['FullAttentionSpec', 'MambaSpec']" in refusal(model_of(spec("FullAttentionSpec"), mamba()), config)


def test_row_12_compressed_and_linear_attention_over_tensor_ranks():
    latent, *rest = csa_linear()
    groups_refused(dataclasses.replace(latent, num_kv_heads=2), *rest)


def test_row_14_compressed_and_linear_attention_with_a_host_buffer(monkeypatch):
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(device_type="cuda"))
    groups_refused(*csa_linear())


def test_row_21_recurrent_states_with_context_ranks():
    config = engine(parallel_config=parallel(decode_context_parallel_size=2))
    assert "['FullAttentionSpec', 'MambaSpec']" in refusal(model_of(spec("FullAttentionSpec"), mamba()), config)


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_row_24_recurrent_states_with_a_prefix_cache(mode):
    groups_refused(spec("FullAttentionSpec", block_size=32), mamba(mamba_cache_mode=mode))


def test_row_29_latent_attention_beside_recurrent_states():
    groups_refused(spec("MLAAttentionSpec", num_kv_heads=1, head_size=576), mamba())


def test_row_36_states_that_have_slots_and_not_tokens():
    groups_refused(mamba(num_speculative_blocks=1), spec("FullAttentionSpec"))


# -- other kinds of attention ------------------------------------------------------------------------------------------


def test_row_42_encoders_and_decoders():
    groups_refused(spec("FullAttentionSpec"), spec("CrossAttentionSpec"))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("SinkFullAttentionSpec", {"sink_len": 4}),
        ("RSWASpec", {"rswa_window": 512}),
        ("HiddenStateCacheSpec", {"num_kv_heads": 1}),
    ],
)
def test_row_43_another_kind_of_specification(kind, fields):
    groups_refused(spec(kind, **fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_quant_mode": 2}, "kv_quant_mode: got=2, supported=0"),
        ({"tokens_per_state": 4}, "tokens_per_state: got=4, supported=1"),
        ({"head_size_v": 32}, "K and V of one size: K=64, V=32"),
    ],
)
def test_row_43_full_attention_of_which_more_or_less_is_kept(fields, words):
    assert words in refusal(model_of(spec("FullAttentionSpec", **fields)))


# -- what the engine is told to do -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "sizes", "words"),
    [
        (1, {"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2, supported is 1"),
        (2, {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 4}, "size=4, supported is 1"),
        (3, {"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2, supported is 1"),
        (4, {"decode_context_parallel_size": 2}, "decode_context_parallel_size=2, supported is 1"),
    ],
)
def test_rows_01_to_04_context_ranks_of_vllm(row, sizes, words):
    """The transfer layer carries them; vLLM deals single tokens to its ranks, and the adapter has no words for that."""
    from kv_engine_adapter.vllm.setup import SchedulerSetup

    with pytest.raises(CallerError, match=words):
        SchedulerSetup(engine(parallel_config=parallel(**sizes)), model_of(spec("FullAttentionSpec")))


@pytest.mark.parametrize(
    ("own", "asked", "words"),
    [
        ("cuda", "cpu", "stages where the caches lie: kv_buffer_device=cpu, caches on cuda"),
        ("xpu", "xpu", "caches on cpu and cuda: got=xpu"),
        ("tpu", "cpu", "caches on cpu and cuda: got=tpu"),
    ],
)
def test_row_05_devices_and_buffers(monkeypatch, own, asked, words):
    from kv_engine_adapter.vllm.setup import SchedulerSetup

    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(device_type=own))
    transfer = SimpleNamespace(kv_buffer_device=asked, kv_connector_extra_config={})
    with pytest.raises(CallerError, match=words):
        SchedulerSetup(engine(kv_transfer_config=transfer), model_of(spec("FullAttentionSpec")))


def test_row_05_nixl_that_is_missing(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(nixl.NixlMissing, match=r"pip install 'kv-transfer\[nixl\]'\): No module named 'nixl"):
        nixl.nixl_agent()


@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "fp8_per_token_head", "int8_per_token_head", "nvfp4"])
def test_row_31_packed_elements_and_scales_of_tokens(dtype):
    """Plain codes are carried with the scales of their layers (docs/decisions/0006-element-conversion.md)."""
    from kv_engine_adapter.vllm.setup import SchedulerSetup

    with pytest.raises(CallerError, match=f"kv_cache_dtype={dtype}, supported are auto"):
        SchedulerSetup(engine(cache_config=SimpleNamespace(cache_dtype=dtype)), model_of(spec("FullAttentionSpec")))


# -- what the engine registers -----------------------------------------------------------------------------------------

HEADS, SIZE, TOKENS, BLOCKS = 2, 8, 4, 3
SHARE = Share(Rank(0), Span(0, 2), Span(0, HEADS))


def layers(*numbers, shape=(BLOCKS, 2, TOKENS, HEADS, SIZE), prefix="", device="cpu"):
    return {f"{prefix}model.layers.{number}.self_attn.attn": torch.zeros(shape, device=device) for number in numbers}


@pytest.mark.parametrize(
    ("registered", "block_size", "words"),
    [
        (layers(0, 1) | layers(1, prefix="draft."), 4, "two cache tensors have layer number 1"),
        (layers(0), 4, r"the engine registered layers \[0\], this rank holds layers \[0, 2\)"),
        (layers(0, 1, 2), 4, r"the engine registered layers \[0, 1, 2\], this rank holds layers \[0, 2\)"),
        (layers(0, 1), 2, "tensor blocks do not divide the scheduler's: tensor=4, scheduler=2"),
        (layers(0, 1, shape=(BLOCKS, 3, 5)), 4, r"shape=\(3, 3, 5\), expected .* with H=2, D=8"),
        (layers(0, 1, shape=(BLOCKS, 2, TOKENS, HEADS, 6)), 4, r"shape=\(3, 2, 4, 2, 6\), expected .* with H=2, D=8"),
        (layers(0) | layers(1, device="meta"), 4, "planes differ: one=.* on meta, first=.* on cpu"),
        (
            {name: cache[:1].expand(BLOCKS, -1, -1, -1, -1) for name, cache in layers(0, 1).items()},
            4,
            r"slots of a plane overlap: shape=\(3, 4, 2, 8\), strides=\(0, ",
        ),
    ],
    ids=[
        *("two of one number", "one missing", "one too many", "scheduler's blocks smaller", "unknown axes"),
        *("other head size", "two memories", "blocks in one place"),
    ],
)
def test_row_43_tensors_that_are_not_a_ranks_caches(registered, block_size, words):
    from kv_engine_adapter.vllm.groups import ModelCaches
    from kv_engine_adapter.vllm.tensors import engine_caches

    told = ModelCaches(HEADS, SIZE, block_size)
    with pytest.raises(CallerError, match=words):
        engine_caches(registered, told, SHARE)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_16_and_19_layers_in_two_kinds_of_memory(device):
    from kv_engine_adapter.vllm.groups import ModelCaches
    from kv_engine_adapter.vllm.tensors import engine_caches

    other = {"cpu": "meta", "meta": "cpu"}[device]
    told = ModelCaches(HEADS, SIZE, TOKENS)
    with pytest.raises(CallerError, match=f"one=.* on {other}, first=.* on {device}"):
        engine_caches(layers(0, device=device) | layers(1, device=other), told, SHARE)


def test_row_33_names_and_order_are_each_engines_own():
    """Registered last layer first and under other names by one engine; layers meet by their number."""
    from kv_engine_adapter.vllm.groups import ModelCaches
    from kv_engine_adapter.vllm.tensors import engine_caches

    state = small_state(fields={"layout": BlockLayout("token_major")})
    told = ModelCaches(4, 4, 4)
    worlds = []
    for prefix, numbers in (("", range(4)), ("language_model.", reversed(range(4)))):
        world = make_world(state, NUM_TOKENS, "CBTHD", seed=len(prefix))
        num_blocks = world.caches[Rank(0)].num_blocks
        registered = layers(*numbers, shape=(num_blocks, 2, 4, 4, 4), prefix=prefix)
        view = engine_caches(registered, told, state.share_of(Rank(0)))
        firsts = [registered[f"{prefix}model.layers.{number}.self_attn.attn"].data_ptr() for number in range(4)]
        assert [plane.data_ptr() for plane in view.caches.planes[::2]] == firsts
        worlds.append(dataclasses.replace(world, caches={Rank(0): view.caches}))
        empty(worlds[-1])
    hub = LoopbackHub()
    p, d = (make_side(hub, name, state, world=world) for name, world in zip("pd", worlds, strict=True))
    with sides(p, d):
        hand_over(p, d)
