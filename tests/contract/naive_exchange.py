"""Questions about an exchange, answered twice: by the seed's rules, and by sets of (layer, head, block).

In:  the arguments of a function case.
Out: for each question the fields of the seed's answer, and of ours.
Law: nothing of the code under test is used. The seed's rules: transfer spec 2.4, 2.5 (support), 3.2 (targets), 4
     (picks), 7.1 (sizes), 11.1 (windows).
"""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from contract.naive_ranks import (
    aligned,
    factor,
    holders_around,
    layers_of,
    seed_need_send,
    seed_picked,
    seed_targets,
    sources,
    unrank,
)
from contract.transfer_states import possible_heads

Args = dict[str, Any]

# -- two sides -----------------------------------------------------------------------------------------------------


def sides_of(args: Args) -> tuple[Args, Args]:
    """Own and peer side in the words of `naive_ranks`."""
    common = common_heads(args)
    return _side(args, "self", common), _side(args, "peer", common)


def common_heads(args: Args) -> int:
    """The largest number of heads that fits both sides; 0 if none does. A latent cache has one."""
    if _is_latent(args):
        return 1
    return max(set(possible_heads(args["self"])) & set(possible_heads(args["peer"])), default=0)


def has_copies(args: Args) -> bool:
    """Whether a head lies on several ranks of one group, on either side."""
    return any(side["width"] > side["heads"] for side in sides_of(args))


def widths_are_powers_of_two(args: Args) -> bool:
    """What the seed asserts of both sides' groups and context ranks."""
    sizes = [side[key] for side in sides_of(args) for key in ("width", "cp")]
    return all(size & (size - 1) == 0 for size in sizes)


def _side(args: Args, name: str, common: int) -> Args:
    given = args[name]
    dp = args.get(f"{name}_dp_rank", given["dp_rank"]) or 0
    width = given["tp"] // given["dp_size"] if given["enable_attention_dp"] else given["tp"]
    return given | {"width": width, "dp": dp, "heads": common, "kv_heads_per_rank": given["num_kv_heads"]}


def _is_latent(args: Args) -> bool:
    return bool(args["self"]["attention_type"] == "mla")


# -- target ranks --------------------------------------------------------------------------------------------------


def seed_exchange(args: Args) -> Args:
    """The seed's answer to `target_ranks`."""
    own, peer = sides_of(args)
    pp, tp, cp = unrank(own, args["self_rank"])
    common = [one for stage in range(peer["pp"]) if (one := layers_of(own, pp) & layers_of(peer, stage))]
    return {
        "ranks": seed_targets(own, peer, args["self_rank"]),
        "domain_pp_size": len(common),
        "domain_tp_size": len(aligned(tp % own["width"], own["width"], peer["width"])),
        "domain_cp_size": len(aligned(cp, own["cp"], peer["cp"])),
        "dup_head_factor": factor(own, peer),
        "peer_dup_head_factor": factor(peer, own),
        "peer_layer_num_in_domain_pp": [len(layers) for layers in common],
        "need_send": seed_need_send(_is_latent(args), own, peer, args["self_rank"]),
    }


def our_exchange(args: Args) -> Args:
    """Our answer to `target_ranks`."""
    own, peer = sides_of(args)
    found = _around(own, peer, args["self_rank"])
    places = [unrank(peer, one) for one in found]
    stages, tensor_ranks, context_ranks = (sorted({place[axis] for place in places}) for axis in range(3))
    mine, theirs = (max(1, side["width"] // side["heads"]) for side in (own, peer))
    common = layers_of(own, unrank(own, args["self_rank"])[0])
    return {
        "ranks": found,
        "domain_pp_size": len(stages),
        "domain_tp_size": len(tensor_ranks),
        "domain_cp_size": len(context_ranks),
        "dup_head_factor": max(1, mine // theirs),
        "peer_dup_head_factor": max(1, theirs // mine),
        "peer_layer_num_in_domain_pp": [len(common & layers_of(peer, stage)) for stage in stages],
        "need_send": any(args["self_rank"] in sources(own, peer, one) for one in found),
    }


def _around(own: Args, peer: Args, rank: int) -> list[int]:
    """Everybody with a common layer, head and part of a sequence that divides evenly."""
    cp = unrank(own, rank)[2]
    return [
        one
        for one in holders_around(own, peer, rank)
        for other in [unrank(peer, one)[2]]
        if cp * peer["cp"] < (other + 1) * own["cp"] and other * own["cp"] < (cp + 1) * peer["cp"]
    ]


# -- picks ---------------------------------------------------------------------------------------------------------


def seed_picks(args: Args) -> Args:
    """The seed's answer to `pick_recv_connections`."""
    own, peer = sides_of(args)
    targets = seed_targets(own, peer, args["self_rank"])
    return _picks(targets, seed_picked(_is_latent(args), peer, own, args["self_rank"]))


def our_picks(args: Args) -> Args:
    """Our answer to `pick_recv_connections`."""
    own, peer = sides_of(args)
    found = _around(own, peer, args["self_rank"])
    taken = sources(peer, own, args["self_rank"])
    return _picks(found, [index for index, one in enumerate(found) if one in taken])


def _picks(ranks: list[int], picked: list[int]) -> Args:
    return {"peer_ranks": ranks, "picked": picked, "receive_from": [ranks[index] for index in picked]}


# -- sizes ---------------------------------------------------------------------------------------------------------


def seed_sent(args: Args) -> Args:
    """The seed's answer to `send_buffer_sizes`."""
    own, peer = sides_of(args)
    pp, tp, cp = unrank(own, args["self_rank"])
    targets = seed_targets(own, peer, args["self_rank"])
    layers = seed_exchange(args)["peer_layer_num_in_domain_pp"]
    num_stages, own_layers = len(layers), len(layers_of(own, pp))
    block = own_layers * _elements(own)
    if _is_latent(args):
        context = aligned(cp, own["cp"], peer["cp"])
        counts = [
            block // own_layers * layers[stage] * len(_dealt(args["num_blocks"], len(context), part))
            for part, stage in product(range(len(context)), range(num_stages))
        ]
        return {"num_targets": len(targets), "num_buffers": len(counts), "element_counts": counts}
    shared = factor(peer, own)
    tensor = len(aligned(tp % own["width"], own["width"], peer["width"]))
    share = args["num_blocks"] * block * shared // tensor // own_layers
    counts = [share * layers[index % num_stages] for index in range(len(targets))]
    return {"num_targets": len(targets), "num_buffers": len(targets) // shared, "element_counts": counts}


def our_sent(args: Args) -> Args:
    """Our answer to `send_buffer_sizes`."""
    own, peer = sides_of(args)
    rank, around = args["self_rank"], _around(own, peer, args["self_rank"])
    receivers = [one for one in around if rank in sources(own, peer, one)]
    moved = [_moved(args, own, rank, peer, one, sources(own, peer, one)[rank]) for one in receivers]
    counts = [count for count in moved if count]
    return {"num_targets": len(counts), "num_buffers": len(counts), "element_counts": counts}


def seed_received(args: Args) -> Args:
    """The seed's answer to `recv_buffer_sizes`; `error` where it fails on legal sizes (A15)."""
    own, _ = sides_of(args)
    layers = seed_exchange(args)["peer_layer_num_in_domain_pp"]
    picked = seed_picks(args)["picked"]
    own_layers = len(layers_of(own, unrank(own, args["self_rank"])[0]))
    total = args["num_blocks"] * own_layers * _elements(own)
    columns = 1 if _is_latent(args) else len(picked) // len(layers)
    counts = [total // (columns * own_layers) * layers[index % len(layers)] for index in range(len(picked))]
    fails = not _is_latent(args) and (total % len(picked) != 0 or total % (columns * own_layers) != 0)
    return {"picked": picked, "element_counts": counts, "error": fails}


def our_received(args: Args) -> Args:
    """Our answer to `recv_buffer_sizes`."""
    own, peer = sides_of(args)
    rank, found = args["self_rank"], our_picks(args)
    taken = sources(peer, own, rank)
    counts = [_moved(args, own, rank, peer, one, taken[one]) for one in found["receive_from"]]
    return {"picked": found["picked"], "element_counts": counts, "error": False}


def _moved(args: Args, own: Args, rank: int, peer: Args, other: int, parts: set[tuple[int, int]]) -> int:
    """Elements of these (layer, head) in the blocks that both ranks hold."""
    num_blocks = args["num_blocks"] * own["cp"]
    mine = _dealt(num_blocks, own["cp"], unrank(own, rank)[2])
    theirs = _dealt(num_blocks, peer["cp"], unrank(peer, other)[2])
    per_head = _elements(own) // (1 if _is_latent(args) else own["num_kv_heads"])
    return len(parts) * len(set(mine) & set(theirs)) * per_head


def _elements(side: Args) -> int:
    """Elements of one layer of a rank's block."""
    return prod(side[key] for key in ("kv_factor", "num_kv_heads", "tokens_per_block", "size_per_head"))


def _dealt(num_blocks: int, num_ranks: int, rank: int) -> range:
    """The blocks of a context rank: the first ranks have one more, until none is left over."""
    counts = [num_blocks // num_ranks + (one < num_blocks % num_ranks) for one in range(num_ranks)]
    return range(sum(counts[:rank]), sum(counts[: rank + 1]))


# -- support -------------------------------------------------------------------------------------------------------

SHAPES = ("dtype", "attention_type", "kv_factor", "size_per_head", "num_layers")


def seed_support(args: Args, attention: str) -> bool:
    """The seed's answer for the formatter of "default" or "mla"."""
    own, peer = args["self"], args["peer"]
    same = all(own[key] == peer[key] for key in (*SHAPES, "tokens_per_block"))
    if not same or own["attention_type"] != attention or isinstance(own["num_kv_heads"], list):
        return False
    if attention == "default":
        return bool(own["cp"] == peer["cp"] == 1)
    divides = all(not one["enable_attention_dp"] or one["tp"] % one["dp_size"] == 0 for one in (own, peer))
    return bool(own["num_kv_heads"] == 1 and divides and not has_wide_groups(peer))


def our_support(args: Args, attention: str) -> bool:
    """Our answer."""
    own, peer = args["self"], args["peer"]
    if not all(own[key] == peer[key] for key in SHAPES) or own["attention_type"] != attention:
        return False
    if any(isinstance(one["num_kv_heads"], list) for one in (own, peer)):
        return False
    if any(one["enable_attention_dp"] and one["tp"] % one["dp_size"] for one in (own, peer)):
        return False
    if attention == "mla":
        return bool(own["num_kv_heads"] == peer["num_kv_heads"] == 1)
    return common_heads(args) > 0


def has_wide_groups(side: Args) -> bool:
    """Attention data parallelism with more than one tensor rank in a group."""
    return bool(side["enable_attention_dp"] and side["tp"] != side["dp_size"])


# -- windows, equality, buffers --------------------------------------------------------------------------------------


def seed_takes_windows(args: Args) -> bool:
    """The seed's rule for alternating windows."""
    pools: Sequence[int] = args["pool_of_local_layer"]
    num_pools = len(set(pools))
    divides = args["self_total_layers"] % args["self_pp"] == 0 and args["dest_total_layers"] % args["dest_pp"] == 0
    alternates = all(pool == pools[at % num_pools] for at, pool in enumerate(pools))
    return divides and alternates and len(set(pools[:num_pools])) == num_pools


def differ_by_rank_only(args: Args) -> bool:
    """Whether two states of numbers are those of two ranks of one instance."""
    own, other = ({key: value for key, value in args[side].items() if key != "dp_rank"} for side in ("a", "b"))
    if not own.get("enable_attention_dp") and not other.get("enable_attention_dp"):
        own, other = ({key: value for key, value in one.items() if key != "dp_size"} for one in (own, other))
    return own == other


HELPERS: Args = {
    "common_heads": common_heads,
    "differ_by_rank_only": differ_by_rank_only,
    "has_copies": has_copies,
    "has_wide_groups": has_wide_groups,
    "our_exchange": our_exchange,
    "our_picks": our_picks,
    "our_received": our_received,
    "our_sent": our_sent,
    "our_support": our_support,
    "seed_exchange": seed_exchange,
    "seed_picks": seed_picks,
    "seed_received": seed_received,
    "seed_sent": seed_sent,
    "seed_support": seed_support,
    "seed_takes_windows": seed_takes_windows,
    "widths_are_powers_of_two": widths_are_powers_of_two,
}
"""What rules may use beside their case's values."""
