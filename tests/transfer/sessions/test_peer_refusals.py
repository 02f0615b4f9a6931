"""What vLLM's NixlConnector refuses (docs/decisions/peer-refusals.md) and we carry: its shapes, as whole hand-overs.

Every test is named after its row. Rows that an engine's adapter meets first are in tests/adapter/test_peer_refusals.py.
"""

from dataclasses import replace

import pytest
import torch

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.exchanges import hand_over, small_state
from kv_testing.tagged import World, empty, make_world
from kv_testing.worlds import ALL, NUM_TOKENS, fresh_id, make_side, pair, sides
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.plan.cache_state import BlockLayout, ParallelLayout

HYBRID = (0, 9, 0, 9)
"""Windows of a model that has full attention in every other layer: vLLM keeps its layers in two groups."""
HEAD_MAJOR, TOKEN_MAJOR = {"layout": BlockLayout("head_major")}, {"layout": BlockLayout("token_major")}


def carried(prefill, decode, tokens=ALL):
    """One hand-over over the loopback agent, judged byte by byte."""
    with pair(prefill, decode) as (p, d, _):
        return hand_over(p, d, tokens)


def carried_between(prefill: World, decode: World):
    """The same for caches of a form of their own."""
    hub = LoopbackHub()
    p, d = (make_side(hub, name, world.state, world=world) for name, world in (("p", prefill), ("d", decode)))
    with sides(p, d):
        return hand_over(p, d)


def world_of(state, form, **more):
    return make_world(state, NUM_TOKENS, form, seed=3, **more)


def packed(world: World) -> World:
    """The same with all layers of a block side by side: one tensor [B, L, C, H, T, D] a rank."""
    caches = {}
    for rank, held in world.caches.items():
        together = torch.stack([plane.transpose(1, 2) for plane in held.planes], 1)
        caches[rank] = replace(held, planes=tuple(plane.transpose(1, 2) for plane in together.unbind(1)))
    return replace(world, caches=caches)


# -- how the tokens of a sequence are dealt ----------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", [small_state(tp=2), small_state(cp=2), small_state(cp=4)])
def test_row_01_context_ranks_at_the_consumer(prefill):
    carried(prefill, small_state(cp=2))


@pytest.mark.parametrize("cut", ["contiguous", "round_robin"])
def test_row_02_context_ranks_beside_tensor_ranks(cut):
    """Prefill and decode context ranks are one number: by how many the tokens are shared."""
    carried(small_state(tp=2, cp=4, context_cut=cut), small_state(tp=4, cp=2))


def test_row_03_context_ranks_in_both_directions():
    with pair(small_state(cp=2), small_state(cp=3, context_cut="round_robin")) as (p, d, _):
        hand_over(p, d)
        empty(p.world)
        hand_over(d, p)


def test_row_04_context_ranks_with_a_sender_that_writes():
    with pair(small_state(cp=2, context_cut="round_robin"), small_state(tp=2)) as (p, d, _):
        hand_over(p, d)
        assert (p.count("bytes_out") > 0, d.count("bytes_read_directly")) == (True, 0)


REPLICATED = ParallelLayout(layers=(Span(0, 4),), heads=(Span(0, 4), Span(0, 4)))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (small_state(tp=2, cp=3), small_state(tp=3)),
        (small_state(fields={"parallel": REPLICATED}), small_state(cp=2, context_cut="round_robin")),
        (small_state(cp=2, context_cut="round_robin"), small_state(fields={"parallel": REPLICATED})),
    ],
    ids=["groups not spanned", "replicated to dealt", "dealt to replicated"],
)
def test_row_11_context_ranks_of_any_number_against_copies(prefill, decode):
    carried(prefill, decode)


@pytest.mark.parametrize("ranks", [(2, 3), (3, 2), (4, 3)])
def test_row_20_context_ranks_that_do_not_divide(ranks):
    prefill, decode = (small_state(cp=cp, context_cut="round_robin") for cp in ranks)
    carried(prefill, decode)


@pytest.mark.parametrize("cut", ["contiguous", "round_robin"])
@pytest.mark.parametrize("blocks", [(4, 2), (2, 8), (4, 4)])
def test_row_23_context_ranks_where_the_schedulers_blocks_are_several_of_the_tensors(blocks, cut):
    """Both deal 8 tokens at a time, whatever blocks their kernels use; and against a peer that deals otherwise."""
    prefill, decode = (
        small_state(cp=2, context_cut=cut, tokens_per_block=size, blocks_per_deal=8 // size) for size in blocks
    )
    carried(prefill, decode)
    carried(prefill, small_state(cp=3, context_cut="round_robin"), Span(5, 31))


@pytest.mark.parametrize("tokens", [ALL, Span(0, 23), Span(5, 31)], ids=str)
def test_row_38_the_length_that_context_ranks_share_is_always_told(tokens):
    carried(small_state(cp=2, context_cut="round_robin"), small_state(cp=3), tokens)
    with pair(small_state(cp=2), small_state()) as (p, d, _):
        order = d.make_order(*p.door.address, p.offer(), tokens=Span(0, 16))
        d.ranks[0].receive(replace(order, tables=replace(order.tables, num_tokens=20)))
        assert "share a sequence of another length: ours=40, theirs=20" in d.outcome(others=[p]).reason
        p.withdraw()


# -- how the layers are cut, and their groups --------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [(2, 2), (1, 3), (3, 0, 1)])
def test_row_08_stages_of_a_hybrid_model(stages):
    carried(small_state(stages=stages, windows=HYBRID), small_state(windows=HYBRID))


@pytest.mark.parametrize("prefill", [small_state(), small_state(stages=(1, 3)), small_state(tp=2, windows=HYBRID)])
def test_row_10_stages_at_the_consumer(prefill):
    carried(prefill, small_state(stages=(3, 1), windows=prefill.windows))


def test_row_15_stages_of_packed_caches():
    """All layers of a block lie side by side at the sender, which has stages; latent caches have no part in it."""
    prefill = packed(world_of(small_state(stages=(1, 3)), "CBHTD"))
    assert prefill.caches[Rank(1)].planes[0].stride(0) == 6 * 4 * 4 * 4, "not packed"
    carried_between(prefill, world_of(small_state(tp=2), "BHT(CD)"))


@pytest.mark.parametrize("blocks", [(4, 16), (16, 4)])
def test_row_17_hybrid_groups_with_other_block_sizes(blocks):
    prefill, decode = (small_state(windows=HYBRID, tokens_per_block=size) for size in blocks)
    carried(prefill, decode)


def test_row_18_hybrid_groups_to_more_tensor_ranks():
    carried(small_state(windows=HYBRID), small_state(tp=4, windows=HYBRID))


def test_row_30_stages_at_the_producer_alone():
    carried(small_state(stages=(1, 2, 1)), small_state())


def test_row_30_layers_that_one_side_alone_has_are_refused():
    """As layers of a draft model would be: what they see cannot be handed over, and is not left out in silence."""
    with pair(small_state(stages=(4,)), small_state(stages=(5,))) as (p, d, _):
        d.order(p, p.offer())
        assert "num_layers differs: ours=5, theirs=4" in d.outcome(others=[p]).reason
        p.withdraw()


@pytest.mark.parametrize("one_group", ["p", "d"])
def test_row_37_cache_groups_of_another_layout(one_group):
    """One side keeps all layers in one block table, the other one for each window."""
    prefill, decode = (
        world_of(small_state(windows=HYBRID), "CBHTD", is_one_group=name == one_group) for name in ("p", "d")
    )
    assert {len(world.tables(Rank(0)).by_group) for world in (prefill, decode)} == {1, 2}
    carried_between(prefill, decode)


def test_row_39_other_groups_other_stages_and_other_numbers_of_blocks():
    prefill = world_of(small_state(stages=(1, 3), windows=HYBRID, tokens_per_block=8), "CBHTD", is_one_group=True)
    decode = world_of(small_state(tp=2, windows=HYBRID), "CBHTD")
    assert len(prefill.table) != len(decode.table)
    carried_between(prefill, decode)


# -- how heads are cut, and how a block lies in memory -----------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_row_22_heads_that_the_producer_holds_twice(tp):
    received = carried(small_state(tp=8, heads=2), small_state(tp=tp, heads=2))
    copies = max(1, tp // 2)
    assert sum(each.num_bytes for each in received) == copies * NUM_TOKENS * 4 * 2 * 2 * 4 * 4, "each head once"


@pytest.mark.parametrize("blocks", [(4, 16), (16, 4)])
def test_row_25_other_block_sizes_with_staging_in_host_memory(blocks):
    prefill, decode = (small_state(tokens_per_block=size) for size in blocks)
    with pair(prefill, decode) as (p, d, _):
        assert {arena.region.kind for side in (p, d) for arena in side.arenas} == {"host"}
        hand_over(p, d)


@pytest.mark.parametrize("orders", [(TOKEN_MAJOR, HEAD_MAJOR), (HEAD_MAJOR, TOKEN_MAJOR)])
@pytest.mark.parametrize("windows", [(), HYBRID], ids=["one group", "hybrid"])
def test_row_26_other_orders_in_memory(orders, windows):
    prefill, decode = (small_state(windows=windows, fields=order) for order in orders)
    carried(prefill, decode)


def test_row_27_the_caches_of_vllms_cpu_attention():
    """As its kernels for x86 write them, to and from those of a GPU, hybrid as they may be."""
    cpu, gpu = (
        world_of(small_state(windows=HYBRID, fields=order), form)
        for order, form in ((HEAD_MAJOR, "BH(CDT) BH(CTD)"), (TOKEN_MAJOR, "BTH(CD)"))
    )
    carried_between(cpu, gpu)
    empty(cpu)
    carried_between(gpu, cpu)


def test_row_27_caches_in_a_packing_that_only_one_side_has_are_refused():
    opaque = {"layout": BlockLayout("head_major", "vllm-cpu-amx")}
    with pair(small_state(windows=HYBRID, fields=opaque), small_state(windows=HYBRID)) as (p, d, _):
        d.order(p, fresh_id())
        assert "tile differs: ours=plain, theirs=vllm-cpu-amx" in d.outcome(others=[p]).reason


@pytest.mark.parametrize("form", ["CBTHD", "BTH(CD)", "BT(CHD)", "split BTHD"])
def test_row_28_heads_cut_where_a_block_is_not_in_one_piece(form):
    prefill, decode = (world_of(small_state(tp=tp, fields=TOKEN_MAJOR), form) for tp in (2, 4))
    carried_between(prefill, decode)


@pytest.mark.parametrize("blocks", [(4, 16), (16, 4)])
def test_row_32_other_block_sizes_and_fewer_tensor_ranks(blocks):
    prefill, decode = (small_state(tp=tp, tokens_per_block=size) for tp, size in zip((4, 2), blocks, strict=True))
    carried(prefill, decode)


def test_row_31_padding_is_each_sides_own():
    """Rows, heads and blocks may lie apart: a length in bytes is no part of what must agree."""
    prefill, decode = world_of(small_state(fields=TOKEN_MAJOR), "CBTHD"), world_of(small_state(), "CBHTD")
    held = prefill.caches[Rank(0)]
    padded = [torch.full((*plane.shape[:-1], 7), plane[0, 0, 0, 0].item())[..., 1:5] for plane in held.planes]
    carried_between(replace(prefill, caches={Rank(0): replace(held, planes=tuple(padded))}), decode)


def test_row_31_another_head_size_is_refused():
    with pair(small_state(), small_state(fields={"head_size": 8})) as (p, d, _):
        d.order(p, fresh_id())
        assert "head_size differs: ours=8, theirs=4" in d.outcome(others=[p]).reason


def test_row_33_tensors_of_another_order_and_another_form():
    """Where a layer lies, and in how many tensors, is each side's own: layers meet by their number."""
    prefill, decode = world_of(small_state(), "split BHTD"), world_of(small_state(), "BCHTD")
    held = prefill.caches[Rank(0)]
    backwards = [plane.clone(memory_format=torch.preserve_format) for plane in reversed(held.planes)]
    carried_between(replace(prefill, caches={Rank(0): replace(held, planes=tuple(reversed(backwards)))}), decode)


@pytest.mark.parametrize("blocks", [(4, 2), (8, 4), (12, 8), (8, 12)])
def test_row_34_blocks_of_the_decode_side_may_be_smaller(blocks):
    prefill, decode = (small_state(tokens_per_block=size) for size in blocks)
    carried(prefill, decode)


@pytest.mark.parametrize("ranks", [(3, 2), (2, 3), (8, 6), (6, 8)])
def test_row_35_tensor_ranks_that_do_not_divide(ranks):
    prefill, decode = (small_state(tp=tp, heads=24) for tp in ranks)
    carried(prefill, decode)


# -- what a request asks for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [Span(0, 23), Span(7, 33), Span(39, 40)], ids=str)
def test_row_36_more_blocks_at_the_decode_side_than_were_supplied(tokens):
    """Tokens are asked for, not blocks: what a table has beyond them is not touched."""
    with pair(small_state(), small_state(tokens_per_block=2)) as (p, d, _):
        transfer = p.offer(num_tokens=tokens.stop)
        d.order(p, transfer, tokens=tokens)
        assert d.outcome(others=[p]).ok
        assert d.misplaced(tokens) == 0
        d.release(p, transfer)


def test_row_36_more_tokens_than_were_supplied_are_refused():
    with pair(small_state(), small_state()) as (p, d, _):
        d.order(p, p.offer(num_tokens=23), tokens=Span(0, 24))
        assert "tokens are not offered: wanted=[0, 24), offered=[0, 23)" in d.outcome(others=[p]).reason
        p.withdraw()
        assert d.misplaced(Span(0, 0)) == 0


def test_row_40_both_directions_with_a_sender_that_writes():
    with pair(small_state(tp=2), small_state()) as (p, d, _):
        hand_over(p, d)
        empty(p.world)
        hand_over(d, p)
        assert p.count("bytes_out") > 0
        assert d.count("bytes_out") > 0
