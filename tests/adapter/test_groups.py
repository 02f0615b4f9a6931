"""Cache groups of vLLM: which are carried, how their tensors are read, what of a window is kept for a peer."""

import pytest
import torch

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import Span
from kv_transfer.plan.cache_state import FULL, LATENT, Share
from kv_transfer.plan.ranges import HOLE

pytest.importorskip("vllm")
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from kv_engine_adapter.vllm.groups import ModelCaches, model_caches
from kv_engine_adapter.vllm.tensors import engine_caches
from kv_engine_adapter.vllm.window_blocks import WindowBlocks

pytestmark = [pytest.mark.vllm]
BLOCK, HEADS, SIZE = 4, 2, 8
USUAL = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": SIZE, "dtype": torch.float32}
WINDOW = {"sliding_window": 10}
CHUNK = {"attention_chunk_size": 12}
LATENT_ROW = {"num_kv_heads": 1, "head_size": 576}
SLIDING = ("SlidingWindowSpec", WINDOW)


INDEXER = {"cache_role": kv_cache_interface.SparseCacheRole.INDEXER}


def spec(kind, **fields):
    return getattr(kv_cache_interface, kind)(**(USUAL | fields))


def config(*specs, num_blocks=64):
    """Two layers a group, numbered in turn: 0 and 2 in the first of two groups."""
    names = [[f"model.layers.{at + len(specs) * turn}.attn" for turn in (0, 1)] for at in range(len(specs))]
    groups = [KVCacheGroupSpec(layers, each) for layers, each in zip(names, specs, strict=True)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def caches(*specs, can_fail_requests=True, can_mix_windows=True):
    return model_caches(config(*specs), can_fail_requests=can_fail_requests, can_mix_windows=can_mix_windows)


@pytest.mark.parametrize(
    ("specs", "attention", "windows", "is_chunked"),
    [
        ([("FullAttentionSpec", {})], FULL, (0,), False),
        ([SLIDING], FULL, (10,), False),
        ([("FullAttentionSpec", {}), SLIDING, SLIDING], FULL, (0, 10, 10), False),
        ([("ChunkedLocalAttentionSpec", CHUNK), ("FullAttentionSpec", {})], FULL, (12, 0), True),
        ([("MLAAttentionSpec", LATENT_ROW)], LATENT, (0,), False),
        # The hybrid manager is off: every token is kept, and carried.
        ([("FullAttentionSpec", WINDOW)], FULL, (0,), False),
        ([("FullAttentionSpec", CHUNK)], FULL, (0,), False),
    ],
)  # fmt: skip
def test_groups_that_are_carried(specs, attention, windows, is_chunked):
    found = caches(*(spec(kind, **fields) for kind, fields in specs))
    assert (found.attention, found.windows, found.is_chunked) == (attention, windows, is_chunked)
    assert (found.block_size, found.num_planes) == (BLOCK, 1 if attention == LATENT else 2)
    assert found.group_of == {f"model.layers.{number}.attn": number % len(specs) for number in range(2 * len(specs))}


def test_layers_of_a_uniform_group_must_be_of_one_shape():
    def uniform(**fields):
        layers = {
            "model.layers.0.attn": spec("FullAttentionSpec"),
            "model.layers.1.attn": spec("FullAttentionSpec", **fields),
        }
        return kv_cache_interface.UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=layers)

    assert caches(uniform(sliding_window=10)).windows == (0,)
    with pytest.raises(CallerError, match="head_size: got=16 and 8"):
        caches(uniform(head_size=16))


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([("FullAttentionSpec", {}), ("SlidingWindowSpec", WINDOW | {"block_size": 8})], "block_size: got=4 and 8"),
        ([("FullAttentionSpec", {}), ("SlidingWindowSpec", WINDOW | {"head_size": 16})], "head_size: got=16 and 8"),
        ([("FullAttentionSpec", {}), ("MLAAttentionSpec", LATENT_ROW)], "or MLAAttentionSpec alone"),
        ([("SlidingWindowSpec", WINDOW), ("ChunkedLocalAttentionSpec", CHUNK)], "one kind of window"),
        ([("SlidingWindowSpec", WINDOW | {"extra_retained_tokens": 2})], "extra_retained_tokens: got=2, supported=0"),
        ([("SlidingWindowMLASpec", LATENT_ROW | WINDOW)], "got=\\['SlidingWindowMLASpec'\\], supported="),
        ([("MLAAttentionSpec", LATENT_ROW | INDEXER)], "got=indexer"),
        ([("MLAAttentionSpec", LATENT_ROW | {"kv_quant_mode": 1})], "kv_quant_mode: got=1, supported=0"),
        ([], "got=\\[\\], supported="),
    ],
)  # fmt: skip
def test_groups_that_are_refused(specs, words):
    with pytest.raises(CallerError, match=words):
        caches(*(spec(kind, **fields) for kind, fields in specs))


def test_windows_are_refused_where_failed_loads_are_told_by_block():
    assert caches(spec("FullAttentionSpec", **WINDOW), can_fail_requests=False).windows == (0,)
    with pytest.raises(CallerError, match=r"supported=vLLM 0\.30 and later"):
        caches(spec("SlidingWindowSpec", **WINDOW), can_fail_requests=False)


def test_a_window_in_a_group_that_sees_all_is_refused_where_all_layers_would_get_it():
    assert caches(spec("FullAttentionSpec"), can_mix_windows=False).windows == (0,)
    with pytest.raises(CallerError, match=r"the window of some when its hybrid cache manager is off"):
        caches(spec("FullAttentionSpec", **WINDOW), can_mix_windows=False)


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_layers_of_several_groups_share_one_memory_and_have_tables_of_their_own():
    """As vLLM lays them out: the first layers of all groups are one tensor, the second ones another."""
    model = caches(spec("FullAttentionSpec"), spec("SlidingWindowSpec", **WINDOW))
    memory = [torch.zeros(6, 2, BLOCK, HEADS, SIZE) for _ in range(2)]
    registered = {f"model.layers.{number}.attn": memory[number // 2] for number in range(4)}
    view = engine_caches(registered, model, Share(Rank(0), Span(0, 4), Span(0, HEADS)))
    assert view.caches.groups == (0, 1, 0, 1)
    assert view.caches.planes[0].data_ptr() == view.caches.planes[2].data_ptr() != view.caches.planes[4].data_ptr()
    assert view.kernel_tables(((1, 2), (HOLE, 3))) == ((1, 2), (HOLE, 3))


def test_a_stage_has_the_tables_of_its_own_groups():
    model = caches(*(spec("SlidingWindowSpec", **WINDOW) for _ in range(2)), spec("FullAttentionSpec"))
    registered = {f"model.layers.{number}.attn": torch.zeros(6, 2, BLOCK, HEADS, SIZE) for number in (4, 5)}
    view = engine_caches(registered, model, Share(Rank(1), Span(4, 6), Span(0, HEADS)))
    assert (view.groups, view.caches.groups) == ((1, 2), (0, 1))
    assert view.kernel_tables(((1,), (2,), (3,))) == ((2,), (3,))


@pytest.mark.parametrize("shape", [(6, BLOCK, 576), (6, 1, BLOCK, 576)])
def test_latent_rows(shape):
    model = caches(spec("MLAAttentionSpec", **LATENT_ROW | {"block_size": 2 * BLOCK}))
    cache = torch.arange(6 * BLOCK * 576, dtype=torch.float32).view(shape)
    view = engine_caches({"model.layers.0.attn": cache}, model, Share(Rank(0), Span(0, 1), Span(0, 1)))
    assert torch.equal(view.caches.planes[0], cache.view(6, BLOCK, 1, 576))
    assert view.kernel_tables(((1, HOLE),)) == ((2, 3, HOLE, HOLE),)


# -- blocks of the last window -----------------------------------------------------------------------------------------


class Engine:
    """vLLM's own manager of blocks, stepped as its scheduler does."""

    def __init__(self, *specs):
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        sizes = {"max_model_len": 256, "scheduler_block_size": BLOCK, "hash_block_size": BLOCK}
        self.manager = KVCacheManager(config(*specs), enable_caching=False, **sizes)
        self.windows = WindowBlocks(caches(*specs))
        self.windows.bind(self.manager)

    @property
    def num_free(self):
        return self.manager.block_pool.get_num_free_blocks()

    def compute(self, request, num_tokens):
        assert self.manager.allocate_slots(request, num_tokens) is not None
        self.windows.keep()
        self.windows.check()
        request.num_computed_tokens += num_tokens

    def finish(self, request):
        """The tables vLLM hands over, windows gone on; and its blocks are free."""
        from kv_engine_adapter.vllm.translate import block_tables

        self.manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)
        tables = block_tables(self.manager.get_block_ids(request.request_id))
        self.manager.free(request)
        self.windows.check()
        return tables


def request_of(num_tokens):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request("r", prompt_token_ids=list(range(num_tokens)), sampling_params=SamplingParams(), pooling_params=None)


@pytest.mark.parametrize("step", [5, 64])
@pytest.mark.parametrize("kind", ["SlidingWindowSpec", "ChunkedLocalAttentionSpec"])
def test_all_that_the_last_token_sees_is_kept_until_it_is_sent(kind, step):
    """Of every prompt, also where the first token it sees ends a block."""
    engine = Engine(spec("FullAttentionSpec"), spec(kind, **(WINDOW if kind == "SlidingWindowSpec" else CHUNK)))
    at_rest, num_restored = engine.num_free, 0
    for num_tokens in range(1, 41):
        request = request_of(num_tokens)
        engine.windows.watch("r", num_tokens)
        while request.num_computed_tokens < num_tokens:
            engine.compute(request, min(step, num_tokens - request.num_computed_tokens))
        tables = engine.finish(request)
        full = engine.windows.completed("r", num_tokens, tables)
        last = num_tokens - 1
        assert full is not None
        first = max(0, last - 9) if kind == "SlidingWindowSpec" else last // 12 * 12
        assert HOLE not in full[1][first // BLOCK : -(-last // BLOCK)]
        assert full[0] == tables[0]
        num_restored += full != tables
        held = set(full[1][first // BLOCK : -(-last // BLOCK)])
        assert at_rest - engine.num_free == len(held), "only what is seen is kept"
        engine.windows.forget("r")
        assert (engine.num_free, len(engine.windows)) == (at_rest, 0)
    assert num_restored > 2, "vLLM itself keeps one token less"


def test_a_window_that_has_moved_on_is_not_offered():
    engine = Engine(spec("FullAttentionSpec"), spec("SlidingWindowSpec", **WINDOW))
    request = request_of(33)
    engine.compute(request, 33)
    assert engine.windows.completed("r", 33, engine.finish(request)) is None, "nobody watched it"


def test_a_request_that_begins_anew_keeps_its_new_blocks():
    engine = Engine(spec("FullAttentionSpec"), spec("SlidingWindowSpec", **WINDOW))
    at_rest, request = engine.num_free, request_of(33)
    engine.windows.watch("r", 33)
    engine.compute(request, 33)
    engine.manager.free(request)
    assert engine.num_free < at_rest
    request.num_computed_tokens = 0
    engine.windows.watch("r", 33)
    assert engine.num_free == at_rest
    engine.compute(request, 33)
    assert engine.windows.completed("r", 33, engine.finish(request)) is not None
    engine.windows.forget("r")
    assert engine.num_free == at_rest


def test_a_preempted_request_keeps_nothing_from_others():
    """Else requests that wait to begin anew could hold all the blocks that they need for it."""
    engine = Engine(spec("FullAttentionSpec"), spec("SlidingWindowSpec", **WINDOW))
    at_rest, request = engine.num_free, request_of(33)
    engine.windows.watch("r", 33)
    engine.compute(request, 33)
    engine.manager.free(request)
    engine.windows.keep(["r", "somebody else"])
    assert (engine.num_free, len(engine.windows)) == (at_rest, 0)


def test_a_request_that_is_preempted_and_begins_anew_in_one_step_is_watched():
    engine = Engine(spec("FullAttentionSpec"), spec("SlidingWindowSpec", **WINDOW))
    request = request_of(33)
    engine.windows.watch("r", 33)
    engine.compute(request, 33)
    engine.manager.free(request)
    request.num_computed_tokens = 0
    engine.windows.watch("r", 33)
    engine.windows.keep(["r"])
    engine.compute(request, 33)
    assert engine.windows.completed("r", 33, engine.finish(request)) is not None


def test_a_broken_law_of_what_is_kept_is_named():
    engine = Engine(spec("FullAttentionSpec"), spec("SlidingWindowSpec", **WINDOW))
    request = request_of(33)
    engine.windows.watch("r", 33)
    engine.compute(request, 33)
    kept = engine.windows._watched["r"].blocks
    place, block = next(iter(kept.items()))
    kept[place] = engine.manager.block_pool.null_block
    with pytest.raises(AssertionError, match="what is kept is a block"):
        engine.windows.check()
    del kept[place]
    with pytest.raises(AssertionError, match="the whole last window is kept, and no more"):
        engine.windows.check()
    kept[place] = block
    engine.windows.check()
    engine.manager.free(request)
    engine.manager.block_pool.free_blocks([block])
    with pytest.raises(AssertionError, match="what is kept is not free"):
        engine.windows.check()
    engine.windows.bind(None)
    with pytest.raises(AssertionError, match="only what a manager gave is kept"):
        engine.windows.check()


def test_nothing_is_watched_without_windows():
    engine = Engine(spec("FullAttentionSpec"))
    engine.windows.watch("r", 33)
    assert len(engine.windows) == 0
    assert engine.windows.completed("r", 5, ((1, 2),)) == ((1, 2),)


def test_what_a_rank_keeps_of_a_plain_model():
    assert ModelCaches(HEADS, SIZE, BLOCK).num_planes == 2
