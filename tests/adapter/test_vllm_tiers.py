"""The tiers under vLLM's objects: how many tokens are there for certain, whose blocks are kept, what is refused."""

from types import SimpleNamespace

import msgspec
import pytest

from kv_core.errors import CallerError
from kv_core.keys import Scope
from kv_core.spans import Span
from kv_engine_adapter.tier_config import TierConfig
from kv_engine_adapter.tier_orders import Answer, tallied
from kv_engine_adapter.tier_terms import BreakEven, TierTerms
from kv_transfer.plan.cache_state import ParallelLayout

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm]

SIZE = 32


class Request(SimpleNamespace):
    """What the adapter reads of a request of vLLM."""

    def __init__(self, name, num_tokens, num_computed, num_prompt, status="FINISHED_STOPPED", **more):
        from vllm.v1.request import RequestStatus

        super().__init__(
            request_id=name, all_token_ids=list(range(num_tokens)), num_tokens=num_tokens, mm_features=[],
            num_computed_tokens=num_computed, num_prompt_tokens=num_prompt, status=RequestStatus[status],
            prompt_token_ids=list(range(num_prompt)), prompt_embeds=None, lora_request=None, cache_salt=None,
            sampling_params=SimpleNamespace(extra_args={"kvferry.decode_priority": 5}), **more,
        )  # fmt: skip


@pytest.mark.parametrize(("num_tokens", "num_computed", "num_prompt", "status", "expected"), [
    (710, 709, 700, "FINISHED_STOPPED", 709),
    (701, 700, 700, "FINISHED_LENGTH_CAPPED", 700),
    (710, 712, 700, "FINISHED_STOPPED", 709),  # steps ahead of what was sampled
    (705, 704, 700, "FINISHED_ABORTED", 704),
    (700, 700, 700, "FINISHED_ABORTED", 700),  # while the first token is sampled
    (700, 699, 700, "FINISHED_ABORTED", 0),  # while it was loaded
    (700, 512, 700, "FINISHED_ABORTED", 0),
    (710, 709, 700, "FINISHED_ERROR", 0),
    (710, 709, 700, "FINISHED_IGNORED", 0),
])  # fmt: skip
def test_what_is_in_the_blocks_for_certain(num_tokens, num_computed, num_prompt, status, expected):
    from kv_engine_adapter.vllm.tiers import num_computed as filled

    assert filled(Request("r", num_tokens, num_computed, num_prompt, status)) == expected


def test_a_request_is_read_as_the_tiers_want_it():
    from kv_engine_adapter.vllm.translate import RequestView

    view = RequestView(Request("r", 5, 4, 3))
    assert (view.num_tokens, view.all_tokens(), view.arguments) == (5, [0, 1, 2, 3, 4], {"kvferry.decode_priority": 5})
    assert view.scope() == Scope()
    pooling = Request("r", 5, 4, 3)
    pooling.sampling_params = None
    assert RequestView(pooling).arguments is None
    adapted = Request("r", 5, 4, 3)
    adapted.lora_request = SimpleNamespace(lora_name="mine")
    assert "mine" in str(RequestView(adapted).scope())


class Pool:
    """Counts references as vLLM's pool does."""

    def __init__(self):
        self.blocks = list(range(1000))
        self.touched, self.freed = [], []

    def touch(self, blocks):
        self.touched += blocks

    def free_blocks(self, blocks):
        self.freed += blocks


def test_blocks_of_a_save_are_kept_until_every_rank_has_answered():
    from kv_engine_adapter.vllm.tiers import SchedulerTiers, TierMetadata

    terms = TierTerms(tokens_per_block=SIZE, num_slots=40, bytes_per_token=10, max_tokens=4096, num_ranks=2,
                      break_even=BreakEven(1.0, 0.0, 0.0))  # fmt: skip
    tiers, pool = SchedulerTiers(terms), Pool()
    tiers.bind(SimpleNamespace(block_pool=pool))
    tiers.finished(Request("r", 71, 70, 65), ((11, 12, 13, 14),))
    assert pool.touched == [11, 12, 13]
    (order,) = tiers.prefixes.take_orders().jobs
    assert order.tokens == Span(0, 70)

    def told(*answers, **more):
        joined = TierMetadata(tallied(answers[:1]))
        for answer in answers[1:]:
            joined = joined.aggregate(TierMetadata(tallied([answer])))
        return SimpleNamespace(kv_connector_worker_meta=joined, finished_recving=None, failed_recving=None)

    tiers.update(told(Answer(order.job, 70)))
    assert tiers.has_pending_frees()
    assert pool.freed == []
    tiers.update(told(Answer(order.job, 70)))
    assert pool.freed == [13, 12, 11]
    assert not tiers.has_pending_frees()
    tiers.finished(Request("again", 71, 70, 65), ((21, 22, 23),))
    assert pool.touched == [11, 12, 13], "it is there already"


def ended_request(salt, items):
    """A real request of vLLM that has ended: 3 blocks and a bit, the last token not computed."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request as Theirs
    from vllm.v1.request import RequestStatus

    init_none_hash(sha256)
    features = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=offset, length=length))
        for name, offset, length in items
    ]
    request = Theirs(
        "r", list(range(3 * SIZE + 4)), SamplingParams(max_tokens=4), None, mm_features=features, cache_salt=salt,
        block_hasher=get_request_block_hasher(SIZE, sha256),
    )  # fmt: skip
    request.append_output_token_ids(7)
    request.num_computed_tokens = request.num_prompt_tokens
    request.status = RequestStatus.FINISHED_STOPPED
    return request


@pytest.mark.parametrize(("salt", "items"), [
    (None, ()), ("salt", ()), ("salt", (("picture", 5, 40), ("film", 60, 10))),
])  # fmt: skip
def test_blocks_are_told_as_vllm_tells_those_of_the_device(salt, items):
    from vllm.v1.core.block_pool import BlockPool

    from kv_engine_adapter.vllm.tiers import SchedulerTiers, TierMetadata

    request = ended_request(salt, items)
    theirs = BlockPool(10, enable_caching=True, hash_block_size=SIZE, enable_kv_cache_events=True)
    blocks = theirs.get_new_blocks(3)
    theirs.cache_full_blocks(
        request, blocks, num_cached_blocks=0, num_full_blocks=3, block_size=SIZE, kv_cache_group_id=0
    )
    (on_device,) = theirs.take_events()

    terms = TierTerms(tokens_per_block=SIZE, num_slots=4, bytes_per_token=10, max_tokens=4096, num_ranks=1,
                      break_even=BreakEven(1.0, 0.0, 0.0), hashes_per_block=1)  # fmt: skip
    tiers = SchedulerTiers(terms)
    tiers.bind(SimpleNamespace(block_pool=Pool()))
    tiers.finished(request, ((1, 2, 3, 4),))
    (order,) = tiers.prefixes.take_orders().jobs
    answers = TierMetadata(tallied([Answer(order.job, order.tokens.stop)]))
    tiers.update(SimpleNamespace(kv_connector_worker_meta=answers, finished_recving=None, failed_recving=None))
    (in_host,) = tiers.take_events()
    assert (on_device.medium, in_host.medium) == ("GPU", "CPU")
    in_host.medium = on_device.medium
    assert msgspec.to_builtins(in_host) == msgspec.to_builtins(on_device)

    tiers.prefixes.reset()
    (gone,) = tiers.take_events()
    assert (gone.medium, gone.group_idx, gone.block_hashes) == ("CPU", 0, on_device.block_hashes[::-1])


def config(tp=1, max_model_len=4096):
    return SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len), tp=tp, kv_events_config=None)


@pytest.fixture
def two_layers(monkeypatch):
    from kv_engine_adapter.vllm import tiers

    monkeypatch.setattr(tiers, "parallel_layout", lambda config: ParallelLayout.even(config.tp, [2], 4))


def test_slots_are_counted_over_all_ranks(two_layers):
    from kv_engine_adapter.vllm.groups import ModelCaches
    from kv_engine_adapter.vllm.tiers import tier_terms

    per_token = 2 * 4 * 2 * 8 * 4
    tier = TierConfig(tier_host_bytes=10 * SIZE * per_token + 5)
    for tp in (1, 2):
        terms = tier_terms(config(tp), tier, ModelCaches(4 // tp, 8, SIZE), 4)
        assert (terms.num_slots, terms.bytes_per_token, terms.num_ranks) == (10, per_token, tp)
        assert not terms.has_disk
    # Heads that two ranks have are kept by both.
    assert tier_terms(config(8), tier, ModelCaches(1, 8, SIZE), 4).num_slots == 5


@pytest.mark.parametrize("missing", ["TELLS_WORKER_METADATA", "REPORTS_FAILED_REQUESTS"])
def test_a_vllm_that_would_not_hear_of_failures_is_refused(two_layers, monkeypatch, missing):
    from kv_engine_adapter.vllm import compat
    from kv_engine_adapter.vllm.groups import ModelCaches
    from kv_engine_adapter.vllm.tiers import tier_terms

    monkeypatch.setattr(compat, missing, False)
    with pytest.raises(CallerError, match="needs a vLLM"):
        tier_terms(config(), TierConfig(tier_host_bytes=1 << 20), ModelCaches(4, 8, SIZE), 4)


def test_what_the_tiers_cannot_keep_is_refused_at_start(two_layers):
    from kv_engine_adapter.vllm.groups import ModelCaches
    from kv_engine_adapter.vllm.tiers import tier_terms

    some = TierConfig(tier_host_bytes=1 << 20)
    assert tier_terms(config(), TierConfig(), ModelCaches(4, 8, SIZE, windows=(0, 64)), 4) is None
    windowed = ModelCaches(4, 8, SIZE, windows=(64, 0), is_chunked=True)
    assert (tier_terms(config(), some, windowed, 4).windows, windowed.is_chunked) == ((64, 0), True)
    with pytest.raises(CallerError, match="no room for a block"):
        tier_terms(config(), TierConfig(tier_host_bytes=10), ModelCaches(4, 8, SIZE), 4)


@pytest.mark.parametrize(("num_computed", "expected"), [(0, {"host": 64, "disk": 6}), (32, {"host": 32, "disk": 6})])
def test_hits_are_told_by_where_they_were(num_computed, expected):
    """Host and disk tiers apart, and they sum to what was announced; what no tier loads came from a peer."""
    from kv_engine_adapter.vllm.connector import FerryConnector
    from kv_engine_adapter.vllm.tiers import SchedulerTiers

    terms = TierTerms(tokens_per_block=SIZE, num_slots=40, bytes_per_token=10, max_tokens=4096, num_ranks=1,
                      break_even=BreakEven(1.0, 0.0, 0.0), has_disk=True)  # fmt: skip
    connector = object.__new__(FerryConnector)
    connector._tiers = tiers = SchedulerTiers(terms)
    tiers.bind(SimpleNamespace(block_pool=Pool()))
    prefixes = tiers.prefixes

    def obeyed(num_tokens):
        """All jobs ordered now are answered with so many tokens."""
        jobs = prefixes.take_orders().jobs
        prefixes.answered(tallied(Answer(job.job, num_tokens) for job in jobs))
        return jobs

    tiers.finished(Request("first", 65, 64, 63), ((1, 2),))  # two blocks for the host tier
    obeyed(64)
    asking = Request("asks", 71, 0, 71, "WAITING", kv_transfer_params=None)
    assert connector.get_num_new_matched_tokens(asking, num_computed) == (None, False), "the disk is asked"
    obeyed(70)
    assert connector.get_num_new_matched_tokens(asking, num_computed) == (None, False), "it is read"
    obeyed(70)
    for _ in range(2):
        assert connector.get_num_new_matched_tokens(asking, num_computed) == (70 - num_computed, True)
    blocks = SimpleNamespace(get_block_ids=lambda: ([4, 5, 6],))
    connector.update_state_after_alloc(asking, blocks, 70 - num_computed)
    sources = connector.get_external_cache_hit_sources(asking, 70 - num_computed)
    assert {source.value: number for source, number in sources.items()} == expected
    assert sum(sources.values()) == 70 - num_computed
    of_peer = connector.get_external_cache_hit_sources(Request("other", 71, 0, 71, "WAITING"), 70)
    assert {source.value: number for source, number in of_peer.items()} == {"p2p": 70}
    assert connector.get_external_cache_hit_sources(Request("other", 71, 0, 71, "WAITING"), 0) == {}


def test_the_same_question_is_answered_without_a_look_at_its_tokens(monkeypatch):
    from unittest.mock import Mock

    from kv_engine_adapter.vllm.connector import FerryConnector
    from kv_engine_adapter.vllm.tiers import SchedulerTiers

    terms = TierTerms(tokens_per_block=SIZE, num_slots=40, bytes_per_token=10, max_tokens=4096, num_ranks=1,
                      break_even=BreakEven(1.0, 0.0, 0.0))  # fmt: skip
    connector = object.__new__(FerryConnector)
    connector._tiers = tiers = SchedulerTiers(terms)
    tiers.bind(SimpleNamespace(block_pool=Pool()))
    asking = Request("asks", 71, 0, 71, "WAITING", kv_transfer_params=None)
    looks = Mock(wraps=tiers.prefixes.num_tokens)
    monkeypatch.setattr(tiers.prefixes, "num_tokens", looks)
    assert [connector.get_num_new_matched_tokens(asking, 0) for _ in range(3)] == [(0, False)] * 3
    assert looks.call_count == 1
    connector.get_num_new_matched_tokens(asking, 32)
    assert looks.call_count == 2, "something else is asked"
    tiers.prefixes.reset()
    connector.get_num_new_matched_tokens(asking, 32)
    assert looks.call_count == 3, "what was there is gone"


@pytest.mark.parametrize("windows", [(0,), (0, 64)])
def test_a_request_that_asks_no_peer_is_watched_all_the_same_where_windows_move_on(windows):
    from kv_engine_adapter.vllm.connector import FerryConnector
    from kv_engine_adapter.vllm.tiers import SchedulerTiers

    terms = TierTerms(tokens_per_block=SIZE, num_slots=40, bytes_per_token=10, max_tokens=4096, num_ranks=1,
                      break_even=BreakEven(1.0, 0.0, 0.0), windows=windows)  # fmt: skip
    connector = object.__new__(FerryConnector)
    connector._tiers = tiers = SchedulerTiers(terms)
    tiers.bind(SimpleNamespace(block_pool=Pool()))
    asking = Request("asks", 71, 0, 71, "WAITING", kv_transfer_params=None)
    connector.update_state_after_alloc(asking, SimpleNamespace(get_block_ids=lambda: ([4, 5, 6],)), 0)
    assert (tiers._running is None) if windows == (0,) else len(tiers._running) == 1
