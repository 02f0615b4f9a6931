"""Who sends what to whom, twice: as the seed works it out from ratios, and as we do from what ranks hold.

In:  the config of a `transfer_pair` case and one of its pairs of data-parallel ranks.
Out: for each field of the expected plan the list over all senders or receivers.
Law: nothing of the code under test is used: the seed's rules are transfer spec 3.2, 4.1, 4.2 and 10.2, ours are sets of
     (layer, head) and the rule of 4.8 (the copy is chosen by the receiver's rank).
"""

from itertools import groupby, product
from typing import Any

Config = dict[str, Any]
Answer = dict[str, list[Any]]


def seed_pair(config: Config, plan: Config) -> Answer:
    """The seed's answer."""
    sides = _sides(config, plan)
    senders, receivers = (ranks_of(side) for side in sides)
    ctx, gen = sides
    is_latent = config["attention_type"] == "mla"
    sending = [seed_need_send(is_latent, ctx, gen, rank) for rank in senders]
    targets = {rank: seed_targets(gen, ctx, rank) for rank in receivers}
    picked = [seed_picked(is_latent, ctx, gen, rank) for rank in receivers]
    found: Answer = {
        "senders.need_send": sending,
        "senders.targets": [seed_targets(ctx, gen, rank) for rank in senders],
        "receivers.peer_ranks": list(targets.values()),
        "receivers.picked": picked,
        "receivers.parts": [],
    }
    for rank, indices in zip(receivers, picked, strict=True):
        found["receivers.parts"].append([_part(ctx, gen, targets[rank][index], rank) for index in indices])
    return found


def our_pair(config: Config, plan: Config) -> Answer:
    """Our answer."""
    ctx, gen = _sides(config, plan)
    senders, receivers = ranks_of(ctx), ranks_of(gen)
    chosen = {rank: set(sources(ctx, gen, rank)) for rank in receivers}
    holding = {rank: holders_around(gen, ctx, rank) for rank in receivers}
    return {
        "senders.need_send": [any(rank in found for found in chosen.values()) for rank in senders],
        "senders.targets": [holders_around(ctx, gen, rank) for rank in senders],
        "receivers.peer_ranks": list(holding.values()),
        "receivers.picked": [sorted(holding[rank].index(one) for one in chosen[rank]) for rank in receivers],
        "receivers.parts": [
            [
                part | {"layers": layers}
                for one in sorted(chosen[rank], key=holding[rank].index)
                for part in [_part(ctx, gen, one, rank)]
                for layers in _by_window(config, part["layers"])
            ]
            for rank in receivers
        ],
    }


def copies(config: Config) -> bool:
    """Whether several sending ranks of one group hold the same head."""
    side = config["context"]
    return bool(side["tp"] // (side["tp"] if side["enable_attention_dp"] else 1) > config["num_kv_heads"])


def _sides(config: Config, plan: Config) -> tuple[Config, Config]:
    found = []
    for side, dp in (("context", "context_dp_rank"), ("generation", "generation_dp_rank")):
        given = config[side]
        width = 1 if given["enable_attention_dp"] else given["tp"]
        found.append(given | {"width": width, "dp": plan.get(dp) or 0, "heads": config["num_kv_heads"]})
    return found[0], found[1]


def unrank(side: Config, rank: int) -> tuple[int, int, int]:
    pp, inner = divmod(rank, side["tp"] * side["cp"])
    return (pp, *divmod(inner, side["cp"]))


def _rank(side: Config, pp: int, tp: int, cp: int) -> int:
    return int(pp * side["tp"] * side["cp"] + tp * side["cp"] + cp)


def _tensor_ranks(side: Config) -> range:
    first = side["dp"] * side["width"] if side["enable_attention_dp"] else 0
    return range(first, first + side["width"])


def ranks_of(side: Config) -> list[int]:
    total = side["tp"] * side["pp"] * side["cp"]
    return [rank for rank in range(total) if unrank(side, rank)[1] in _tensor_ranks(side)]


def layers_of(side: Config, pp: int) -> set[int]:
    first = sum(side["layers_per_pp"][:pp])
    return set(range(first, first + side["layers_per_pp"][pp]))


def heads_of(side: Config, tp: int) -> set[int]:
    within, width = tp % side["width"], side["width"]
    if width > side["heads"]:
        return {within * side["heads"] // width}
    each = side["heads"] // width
    return set(range(within * each, (within + 1) * each))


def seed_targets(own: Config, peer: Config, rank: int) -> list[int]:
    pp, tp, cp = unrank(own, rank)
    stages = [stage for stage in range(peer["pp"]) if layers_of(own, pp) & layers_of(peer, stage)]
    base = peer["dp"] * peer["width"] if peer["enable_attention_dp"] else 0
    tensor = [base + one for one in aligned(tp % own["width"], own["width"], peer["width"])]
    context = aligned(cp, own["cp"], peer["cp"])
    return [_rank(peer, stage, one, other) for other, one, stage in product(context, tensor, stages)]


def aligned(index: int, own: int, peer: int) -> list[int]:
    if own <= peer:
        return list(range(index * (peer // own), (index + 1) * (peer // own)))
    return [index // (own // peer)]


def factor(own: Config, peer: Config) -> int:
    """How many of our ranks hold what one of theirs does."""
    mine, theirs = own["kv_heads_per_rank"] * own["width"], peer["kv_heads_per_rank"] * peer["width"]
    return max(1, int(mine // theirs))


def seed_need_send(is_latent: bool, ctx: Config, gen: Config, rank: int) -> bool:
    """Whether a sending rank gives anything (4.1, 10.2)."""
    dup = max(1, ctx["width"] // gen["width"]) if is_latent else factor(ctx, gen)
    peer_dp = gen["dp"] if gen["enable_attention_dp"] else 0
    return bool(peer_dp % dup == unrank(ctx, rank)[1] % ctx["width"] % dup)


def seed_picked(is_latent: bool, ctx: Config, gen: Config, rank: int) -> list[int]:
    """Which of its targets a receiving rank reads from (4.2, 10.3)."""
    pp = unrank(gen, rank)[0]
    stages = sum(bool(layers_of(gen, pp) & layers_of(ctx, stage)) for stage in range(ctx["pp"]))
    tensor = max(1, ctx["width"] // gen["width"])
    own_dp = gen["dp"] if gen["enable_attention_dp"] else 0
    if is_latent:
        return [stage + own_dp % tensor * stages for stage in range(stages)]
    dup = factor(ctx, gen)
    return [one * stages + stage for one in range(tensor) if one % dup == own_dp % dup for stage in range(stages)]


def holders_around(own: Config, peer: Config, rank: int) -> list[int]:
    pp, tp, _ = unrank(own, rank)
    return [
        _rank(peer, stage, tensor, context)
        for context, tensor, stage in product(range(peer["cp"]), _tensor_ranks(peer), range(peer["pp"]))
        if layers_of(own, pp) & layers_of(peer, stage) and heads_of(own, tp) & heads_of(peer, tensor)
    ]


def sources(ctx: Config, gen: Config, rank: int) -> dict[int, set[tuple[int, int]]]:
    """The (layer, head) that a receiving rank takes from each sending one, if all of them hold some of the sequence."""
    pp, tp, _ = unrank(gen, rank)
    found: dict[int, set[tuple[int, int]]] = {}
    for head in heads_of(gen, tp):
        holders = [tensor for tensor in _tensor_ranks(ctx) if head in heads_of(ctx, tensor)]
        tensor = holders[rank % len(holders)]
        for stage, context in product(range(ctx["pp"]), range(ctx["cp"])):
            if common := layers_of(gen, pp) & layers_of(ctx, stage):
                sender = _rank(ctx, stage, tensor, context)
                found.setdefault(sender, set()).update((layer, head) for layer in common)
    return found


def _part(ctx: Config, gen: Config, sender: int, receiver: int) -> Config:
    (pp, tp, _), (own_pp, own_tp, _) = unrank(ctx, sender), unrank(gen, receiver)
    layers, heads = layers_of(ctx, pp) & layers_of(gen, own_pp), heads_of(ctx, tp) & heads_of(gen, own_tp)
    spans = {"layers": [min(layers), max(layers) + 1], "heads": [min(heads), max(heads) + 1]}
    return {"from_rank": sender} | spans


def _by_window(config: Config, layers: list[int]) -> list[list[int]]:
    windows = config.get("attention_windows") or [0]
    found = []
    for _, group in groupby(range(*layers), key=lambda layer: windows[layer % len(windows)]):
        run = list(group)
        found.append([run[0], run[-1] + 1])
    return found
