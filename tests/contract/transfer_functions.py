"""Function cases of the transfer, called on ours: ranks, picks, sizes, support, context blocks, windows, messages.

In:  the arguments of a case.
Out: the fields that the cases may expect.
Law: this only translates; every answer is the library's. Who is concerned is asked of the plan for one sequence: of
     the case's number of blocks, or else of one that every context rank holds as much of.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from contract.case import UnknownKind
from contract.transfer_states import Args, even_length, exchanging_pair, group_of, pair_of, state_of
from kv_core.config import ManagerConfig, WindowConfig
from kv_core.errors import CallerError, CapacityError
from kv_core.ids import BlockId, Incarnation, InstanceId, Rank, RequestId, SessionId, TransferId
from kv_core.manager import KVCacheManager
from kv_core.request import Request
from kv_core.spans import Span, ceil_div
from kv_transfer.agent.cards import AgentCard
from kv_transfer.formatter.attention import AttentionFormatter
from kv_transfer.plan.cache_state import FULL, LATENT, BlockLayout, CacheState, ParallelLayout, Share
from kv_transfer.plan.compatibility import reasons
from kv_transfer.plan.context import TokenShare
from kv_transfer.plan.elements import ITEM_BYTES
from kv_transfer.plan.plan import Chunk, Piece, SessionPlan, counterparts, num_bytes_of, receive_plans, send_plans
from kv_transfer.plan.ranges import HOLE, BlockRange, block_range
from kv_transfer.plan.sizing import staging_bytes
from kv_transfer.pools import PagedCaches, planes_of
from kv_transfer.protocol.codec import decode, encode
from kv_transfer.protocol.messages import Ask, Hello, Message, RankCard

# -- ranks ---------------------------------------------------------------------------------------------------------


def target_ranks(args: Args) -> Args:
    """Whom `self_rank` may have to do with, and whether it gives anything when `self` is the sender."""
    ours, peer = exchanging_pair(args)
    rank, length = Rank(args["self_rank"]), even_length(args)
    found = counterparts(ours, rank, peer, length, group=group_of(args, "peer"))
    share, places = ours.share_of(rank), [peer.parallel.coordinates_of(one) for one in found]
    stages, tensor_ranks, context_ranks = (sorted({place[axis] for place in places}) for axis in range(3))
    mine, theirs = (
        state.parallel.num_copies(share.heads.start, group_of(args, side))
        for state, side in ((ours, "self"), (peer, "peer"))
    )
    groups = {"group": group_of(args, "self"), "peer_group": group_of(args, "peer")}
    return {
        "ranks": list(found),
        "domain_pp_size": len(stages),
        "domain_tp_size": len(tensor_ranks),
        "domain_cp_size": len(context_ranks),
        "dup_head_factor": max(1, mine // theirs),
        "peer_dup_head_factor": max(1, theirs // mine),
        "peer_layer_num_in_domain_pp": [len(share.layers & peer.parallel.layers[stage]) for stage in stages],
        "need_send": bool(send_plans(ours, rank, peer, Span(0, length), **groups)),
    }


def pick_recv_connections(args: Args) -> Args:
    """From whom `self_rank` takes."""
    found, plans = _received(args, even_length(args))
    picked = sorted(found.index(plan.sender) for plan in plans)
    return {"picked": picked, "peer_ranks": list(found), "receive_from": [found[index] for index in picked]}


def _received(args: Args, length: int) -> tuple[list[Rank], Sequence[SessionPlan]]:
    """The counterparts of a receiver, and what it takes, in their order."""
    ours, peer = exchanging_pair(args)
    rank, group = Rank(args["self_rank"]), group_of(args, "peer")
    found = list(counterparts(ours, rank, peer, length, group=group))
    plans = receive_plans(ours, rank, peer, Span(0, length), group=group)
    return found, sorted(plans, key=lambda plan: found.index(plan.sender))


# -- sizes ---------------------------------------------------------------------------------------------------------


def send_buffer_sizes(args: Args) -> Args:
    """What `self_rank` gives to each: one staged buffer for each receiver."""
    ours, peer = exchanging_pair(args)
    rank, length = Rank(args["self_rank"]), _length(args)
    group, peer_group = group_of(args, "self"), group_of(args, "peer")
    order = counterparts(ours, rank, peer, length, group=peer_group)
    plans = send_plans(ours, rank, peer, Span(0, length), group=group, peer_group=peer_group)
    counts = [_elements(plan, ours) for plan in sorted(plans, key=lambda plan: order.index(plan.receiver))]
    return {"num_targets": len(counts), "num_buffers": len(counts), "element_counts": counts}


def recv_buffer_sizes(args: Args) -> Args:
    """What `self_rank` takes from each."""
    found, plans = _received(args, _length(args))
    sender = exchanging_pair(args)[1]
    return {
        "picked": [found.index(plan.sender) for plan in plans],
        "element_counts": [_elements(plan, sender) for plan in plans],
    }


def _length(args: Args) -> int:
    """Tokens of a sequence of which our context rank holds that many blocks."""
    return int(args["num_blocks"] * args["self"]["cp"] * args["self"]["tokens_per_block"])


def _elements(plan: SessionPlan, sender: CacheState) -> int:
    return plan.num_bytes // ITEM_BYTES[sender.dtype]


def pre_alloc_buffer_size(args: Args) -> Args:
    """Staging memory in which as many requests lie as the case counts buffers."""
    sizes = {int(window): size for window, size in args["cache_size_bytes_per_token_per_window"].items()}
    tokens, block = args["max_tokens_in_buffer"], args["tokens_per_block"]
    arenas = [
        staging_bytes(sizes, tokens, block, count) for count in (args["send_buffer_count"], args["recv_buffer_count"])
    ]
    return {"per_buffer_bytes": staging_bytes(sizes, tokens, block), "total_bytes": sum(arenas)}


# -- support -------------------------------------------------------------------------------------------------------


def inquire_support(args: Args, attention: str) -> bool:
    """Whether the two may exchange, with the formatter for this kind of attention. What can be no cache may not."""
    try:
        ours, peer = pair_of(args)
    except CallerError:
        return False
    return ours.attention == attention and not reasons(ours, peer)


def check_alternate_window(args: Args) -> Args:
    """Whether a cache whose stages repeat these windows can be exchanged with one of another depth."""
    pattern = [8 * (1 + pool) for pool in args["pool_of_local_layer"]]
    ours, peer = (
        _windowed(args[f"{side}_total_layers"], args[f"{side}_pp"], pattern, args["self_pp"])
        for side in ("self", "dest")
    )
    if found := reasons(ours, peer):
        raise CallerError("; ".join(map(str, found)))
    plans = [plan for rank in peer.parallel.ranks for plan in receive_plans(peer, rank, ours, Span(0, 4))]
    moved = [layer for plan in plans for piece in plan.pieces for layer in piece.layers]
    return {"ok": sorted(moved) == list(range(args["self_total_layers"]))}


def _windowed(num_layers: int, num_stages: int, pattern: list[int], num_repeats: int) -> CacheState:
    each, rest = divmod(num_layers, num_stages)
    windows = (pattern * max(num_repeats, ceil_div(num_layers, len(pattern))))[:num_layers]
    return CacheState(
        fingerprint="model",
        dtype="float16",
        head_size=8,
        num_layers=num_layers,
        num_kv_heads=1,
        tokens_per_block=4,
        layout=BlockLayout("head_major"),
        windows=tuple(windows),
        parallel=ParallelLayout.even(1, [each + (stage < rest) for stage in range(num_stages)], 1),
    )


# -- context-parallel blocks -----------------------------------------------------------------------------------------


def context_blocks(args: Args) -> Sequence[int]:
    """The blocks of one context rank."""
    cut = "round_robin" if args.get("round_robin") else "contiguous"
    return TokenShare(cut, args["cp_size"], args["cp_rank"], 1, args["num_total_blocks"]).blocks


def global_block(args: Args) -> int:
    """Where in the sequence a block of a context rank lies."""
    blocks, local = context_blocks(args), args["local_block_idx"]
    if local not in range(len(blocks)):
        raise CallerError(f"the context rank has no such block: wanted={local}, held={len(blocks)}")
    return blocks[local]


def cp_sequence_share(args: Args) -> list[Args]:
    """Every context rank's part of one sequence."""
    shares = [
        TokenShare("contiguous", args["cp_size"], rank, args["tokens_per_block"], args["total_seq_len"])
        for rank in range(args["cp_size"])
    ]
    return [
        {
            "cp_rank": share.rank,
            "num_blocks": len(share.blocks),
            "seq_len": sum(map(len, share.runs)),
            "global_block_ids": list(share.blocks),
        }
        for share in shares
    ]


# -- blocks of a request -------------------------------------------------------------------------------------------


def iterate_block_range(args: Args) -> Args:
    """What lies in the blocks of a range, gathered in its order. Each block is full of one value."""
    num_blocks, num_layers, num_planes, elements = args["pool_shape"]
    if args["pool_fill"] != "block index":
        raise UnknownKind(f"filling {args['pool_fill']!r}")
    pool = torch.arange(num_blocks, dtype=torch.float32)[:, None, None, None].expand(args["pool_shape"]).contiguous()
    share = Share(Rank(0), Span(0, num_layers), Span(0, 1))
    caches = PagedCaches.of_layers(share, [planes_of(layer, "BCD") for layer in pool.unbind(1)], tokens_per_block=1)
    every = Span(0, len(args["block_ids"]))
    blocks = BlockRange(every, tuple(map(BlockId, args["block_ids"])))
    out = torch.empty(len(every) * num_layers * num_planes * elements * pool.itemsize, dtype=torch.uint8)
    chunk = Chunk(0, Piece(share.layers, share.heads), every, len(out))
    try:
        AttentionFormatter("token_major").split(chunk, caches, blocks, out)
    except ValueError as error:  # the kernels know no errors of ours
        raise CallerError(str(error)) from error
    rows = out.view(pool.dtype).view(num_layers * num_planes, len(every), elements).transpose(0, 1).flatten(1)
    if not bool((rows == rows[:, :1]).all()):
        raise CallerError("a block's elements differ")
    return {"values": [int(row[0]) for row in rows], "elements_per_block": rows.shape[1]}


def iterate_sequence_blocks(args: Args) -> Args:
    """The blocks of a prompt, and the elements of one."""
    config, tokens = args["config"], args["prompt_tokens"]
    block, window = config["tokens_per_block"], WindowConfig(config["window"], config["primary_blocks"], 0)
    manager = KVCacheManager(
        ManagerConfig(tokens_per_block=block, windows=(window,), max_sequence_length=config["max_sequence_length"])
    )
    name = RequestId("prompt")
    if manager.add(Request(name, tokens)) is None:
        raise CapacityError(f"the prompt does not fit: tokens={len(tokens)}, blocks={config['primary_blocks']}")
    table = [HOLE if one is None else one for one in manager.block_ids(name, window.window)]
    found = block_range(table, Span(0, len(tokens)), block)
    per_rank = {"tp": 1, "pp": 1, "cp": 1, "layers_per_pp": [config["num_layers"]], "attention_type": "default"}
    state = state_of(config | per_rank | {"kv_factor": 2, "enable_attention_dp": False})
    num_bytes = num_bytes_of(Span(0, state.num_layers), Span(0, state.num_kv_heads), Span(0, block), state)
    elements = num_bytes // ITEM_BYTES[state.dtype]
    return {"block_ids": list(found.ids), "num_blocks": len(found.ids), "elements_per_block": elements}


# -- serialisation ---------------------------------------------------------------------------------------------------


AGENT = AgentCard(kind="loopback", name="a", blob=b"")


def request_info_round_trip(args: Args) -> Args:
    """What a receiver tells of itself and asks, as bytes and back."""
    state = state_of(args["cache_state"])
    where = args["comm_state"]
    # A card always tells its rank: what the cases leave open (-1) is the first one.
    rank = Rank(max(0, where.get("self_index", -1)))
    host, port = where.get("ip", "127.0.0.1"), where.get("port", 1)
    card = RankCard(rank=rank, host=host, port=port, state=state, max_chunk_bytes=1 << 20)
    length = state.parallel.num_context_ranks * state.tokens_per_block
    plans = receive_plans(state, rank, state, Span(0, length))
    messages: list[Message] = [
        Hello(instance=InstanceId("a"), incarnation=Incarnation("1"), card=card, agent=AGENT),
        *(_ask(args["request_id"], one) for one in plans),
    ]
    packets = [encode(message) for message in messages]
    told = [decode(packet) for packet in packets]
    sizes_match = [len(encode(one)) for one in told] == [len(packet) for packet in packets]
    return {"equal": told == messages, "serialized_size_matches": sizes_match}


def _ask(request_id: int, plan: SessionPlan) -> Ask:
    return Ask(
        session=SessionId(f"{request_id:032x}"),
        incarnation=Incarnation("1"),
        transfer_id=TransferId(f"{request_id:032x}"),
        prompt_key=b"key",
        tokens=plan.tokens,
        num_tokens=plan.tokens.stop,
        pieces=plan.pieces,
        chunk_bytes=1 << 20,
        layers_per_chunk=0,
        checksum=True,
        direct=False,
        ttl_ms=1000,
    )


def cache_state_equal(args: Args) -> bool:
    """Whether two instances say the same of their caches."""
    one, other = (state_of(_written_out(args[side])) for side in ("a", "b"))
    return one == other


def _written_out(given: Args) -> Args:
    """A state that is told by its model and world, as one of numbers."""
    if "from_model_config" not in given:
        return given
    model, world = given["from_model_config"], given["world"]
    numbers = {
        "num_layers": model["num_attention_layers"],
        "num_kv_heads": model["num_heads"],
        "size_per_head": model["hidden_size"] // model["num_heads"],
        "tokens_per_block": model["tokens_per_block"],
        "dtype": model["dtype"],
        "enable_attention_dp": given.get("enable_attention_dp", False),
        "dp_rank": 0,
        "dp_size": world["tp"],
    }
    return numbers | world | {key: given[key] for key in ("layers_per_pp", "attention_type", "kv_factor")}


FUNCTIONS: Mapping[str, Callable[[Args], Any]] = {
    "target_ranks": target_ranks,
    "pick_recv_connections": pick_recv_connections,
    "send_buffer_sizes": send_buffer_sizes,
    "recv_buffer_sizes": recv_buffer_sizes,
    "pre_alloc_buffer_size": pre_alloc_buffer_size,
    "inquire_support_mha": lambda args: inquire_support(args, FULL),
    "inquire_support_mla": lambda args: inquire_support(args, LATENT),
    "check_alternate_window": check_alternate_window,
    "block_num_accounting_for_cp": lambda args: len(context_blocks(args)),
    "global_block_id_accounting_for_cp": global_block,
    "cp_sequence_share": cp_sequence_share,
    "iterate_block_range": iterate_block_range,
    "iterate_sequence_blocks": iterate_sequence_blocks,
    "request_info_round_trip": request_info_round_trip,
    "cache_state_equal": cache_state_equal,
}
