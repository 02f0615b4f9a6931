"""Random questions about an exchange with the seed's answers as expectations: cases that no file holds.

In:  a random source and which question.
Out: function cases, and scenarios of staging buffers, expected as the seed answers them.
Law: only what the seed answers is asked: where it would fall over, the case expects the error.
"""

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

from contract.case import Case
from contract.naive_buffers import sliced
from contract.naive_exchange import (
    seed_exchange,
    seed_picks,
    seed_received,
    seed_sent,
    seed_support,
    seed_takes_windows,
    widths_are_powers_of_two,
)
from contract.naive_ranks import seed_pair

Content = dict[str, Any]
BUFFER_BYTES = 1 << 20


def random_exchange(number: int, question: str) -> Case:
    """The case of this number, always the same."""
    content = QUESTIONS[question](Random(number))
    return Case("random", {"name": f"random-{question}-{number}"} | content)


# -- states --------------------------------------------------------------------------------------------------------


def _pair(
    random: Random, *, latent: bool | None = None, self_cp: int = 1, peer_cp: int = 1, odd: bool = False
) -> Content:
    """Two sides of one model, now and then of two."""
    is_latent = random.random() < 0.4 if latent is None else latent
    num_layers, num_heads = random.randint(2, 9), random.choice([1, 2, 4, 6, 8])
    shape = {
        "num_layers": num_layers,
        "size_per_head": random.choice([4, 8]),
        "tokens_per_block": random.choice([4, 8]),
        "dtype": random.choice(["float", "half", "int8"]),
        "attention_type": "mla" if is_latent else "default",
        "kv_factor": 1 if is_latent else 2,
    }
    cuts = {"self": self_cp if is_latent else 1, "peer": peer_cp if is_latent else 1}
    sides = {}
    for side, cp in cuts.items():
        heads = num_heads if is_latent or random.random() < 0.9 else random.choice([1, 2, 4, 6, 8])
        sides[side] = shape | _cut(random, num_layers, 1 if is_latent else heads, cp, odd)
    return sides


def _cut(random: Random, num_layers: int, num_heads: int, cp: int, odd: bool) -> Content:
    widths = [1, 2, 4, 8] + ([3, 6] if odd else [])
    width = random.choice([one for one in widths if num_heads % one == 0 or one % num_heads == 0])
    groups = random.choice([1, 1, 2, 4]) if width == 1 else 1
    stages = random.randint(1, min(3, num_layers))
    bounds = [0, *sorted(random.sample(range(1, num_layers), stages - 1)), num_layers]
    return {
        "num_kv_heads": max(1, num_heads // width),
        "tp": width * groups,
        "pp": stages,
        "cp": cp,
        "layers_per_pp": [stop - start for start, stop in pairwise(bounds)],
        "enable_attention_dp": groups > 1,
        "dp_rank": random.randrange(groups),
        "dp_size": width * groups,
    }


def _rank(random: Random, side: Content) -> int:
    """A rank of the group that holds the request."""
    stage, context = random.randrange(side["pp"]), random.randrange(side["cp"])
    tensor = side["dp_rank"] if side["enable_attention_dp"] else random.randrange(side["tp"])
    return int((stage * side["tp"] + tensor) * side["cp"] + context)


# -- questions -----------------------------------------------------------------------------------------------------


def _ranks(random: Random) -> Content:
    args = _pair(random, self_cp=random.choice([1, 1, 2, 4]), peer_cp=random.choice([1, 1, 2, 4]), odd=True)
    args["self_rank"] = _rank(random, args["self"])
    expect = seed_exchange(args) if widths_are_powers_of_two(args) else {"error": True}
    return _function("target_ranks", args, expect)


def _picks(random: Random) -> Content:
    args = _pair(random, self_cp=random.choice([1, 1, 2]))
    args["self_rank"] = _rank(random, args["self"])
    args["self_dp_rank"] = args["self"]["dp_rank"]
    found = seed_picks(args)
    args["num_connections"] = len(found["peer_ranks"])
    derived = {"peer_ranks": found["peer_ranks"], "receive_from": found["receive_from"]}
    return _function("pick_recv_connections", args, {"picked": found["picked"]}) | {"expect_derived": derived}


def _sent(random: Random) -> Content:
    args = _pair(random, peer_cp=random.choice([1, 2, 4]))
    args |= {"self_rank": _rank(random, args["self"]), "num_blocks": random.randint(1, 9)}
    return _function("send_buffer_sizes", args, seed_sent(args))


def _received(random: Random) -> Content:
    args = _pair(random, self_cp=random.choice([1, 2]))
    args |= {"self_rank": _rank(random, args["self"]), "num_blocks": random.randint(1, 9)}
    if not seed_picks(args)["picked"]:  # sides of two models, from which the seed would divide by zero
        return _received(random)
    found = seed_received(args)
    fails = found.pop("error")
    return _function("recv_buffer_sizes", args, {"error": True} if fails else found)


def _support(random: Random) -> Content:
    args = _pair(random, peer_cp=random.choice([1, 2]))
    kind = random.choice(["default", "mla", args["self"]["attention_type"]])
    for _ in range(random.choice([0, 0, 1, 2])):
        side = random.choice(["self", "peer"])
        field, values = random.choice(list(CHANGES.items()))
        args[side] = args[side] | {field: random.choice(values)}
    expect = seed_support(args, kind)
    return _function("inquire_support_mla" if kind == "mla" else "inquire_support_mha", args, expect)


CHANGES: dict[str, list[Any]] = {
    "dtype": ["float", "half", "bf16"],
    "attention_type": ["mla", "default"],
    "kv_factor": [1, 2],
    "size_per_head": [4, 8, 16],
    "tokens_per_block": [4, 8, 16],
    "cp": [1, 2],
    "num_kv_heads": [1, 2, 3],
}


def _windows(random: Random) -> Content:
    pattern = random.choice([[0, 1], [0, 0, 1], [0, 1, 2], [0, 0, 1, 1], [0, 1, 1, 0]])
    own, dest = random.choice([1, 2, 3]), random.choice([1, 2, 3, 4])
    pools = pattern * random.randint(1, 3)
    total = len(pools) * own
    args = {"pool_of_local_layer": pools, "self_total_layers": total, "self_pp": own, "dest_pp": dest}
    args["dest_total_layers"] = total if random.random() < 0.9 else total + dest
    return _function("check_alternate_window", args, {"ok": True} if seed_takes_windows(args) else {"error": True})


def _equality(random: Random) -> Content:
    one = _pair(random, latent=False)["self"]
    other = dict(one)
    for _ in range(random.choice([0, 1, 2])):
        field, values = random.choice(list((CHANGES | {"dp_rank": [0, 1], "tp": [8, 16]}).items()))
        other[field] = random.choice(values)
    other["dp_size"] = other["tp"] if one["enable_attention_dp"] else other["dp_size"]
    return _function("cache_state_equal", {"a": one, "b": other}, one == other)


def _buffers(random: Random) -> Content:
    """Indices of one side taken and given back; targets of any size in between."""
    config: Content = {
        "target": "trans_buffer_manager",
        "num_layers": 4,
        "num_kv_heads": 2,
        "size_per_head": 64,
        "tokens_per_block": 8,
        "cache_type": "self",
        "dtype": random.choice(["float", "half"]),
        "max_blocks_per_sequence": 10,
        "max_num_tokens": None,
        "transfer_buffer_bytes": BUFFER_BYTES,
        "send_buffer_count": random.randint(1, 3),
        "recv_buffer_count": 1,
    }
    steps, held = [], list[int]()
    for _ in range(random.randint(3, 8)):
        if held and random.random() < 0.5:
            steps.append(_targets(random, config, random.choice(held)))
        elif held and random.random() < 0.4:
            index = held.pop(random.randrange(len(held)))
            steps.append({"op": "free_buffer_index", "side": "send", "index": index})
        elif len(held) < config["send_buffer_count"]:
            index = min(set(range(config["send_buffer_count"])) - set(held))
            held.append(index)
            steps.append({"op": "assign_buffer_index", "side": "send", "expect": {"index": index}})
    return {"kind": "scenario", "config": config, "steps": steps}


def _targets(random: Random, config: Content, index: int) -> Content:
    item = 4 if config["dtype"] == "float" else 2
    unit = BUFFER_BYTES // item // 8
    sizes = [random.randint(1, 4) * unit if random.random() < 0.5 else random.randint(1, 9 * unit) for _ in range(4)]
    covered = len(sliced(BUFFER_BYTES, [size * item for size in sizes]))
    expect = {"num_buffers": len(sizes), "covered": covered, "only_dynamic": False, "sizes": sizes}
    return {"op": "get_or_allocate_buffers", "side": "send", "index": index, "target_sizes": sizes, "expect": expect}


# -- pairs ---------------------------------------------------------------------------------------------------------


def _pairs(random: Random) -> Content:
    """One request moved between two small instances, and what both sides make of it."""
    is_latent, num_layers = random.random() < 0.4, random.randint(2, 5)
    num_heads = 1 if is_latent else random.choice([1, 2, 4])
    context = _cut(random, num_layers, num_heads, 1, odd=False)
    generation = _cut(random, num_layers, num_heads, random.choice([1, 1, 2]) if is_latent else 1, odd=False)
    config = {
        "target": "transfer_pair",
        "num_layers": num_layers,
        "num_kv_heads": num_heads,
        "size_per_head": 4,
        "tokens_per_block": 4,
        "kv_factor": 1 if is_latent else 2,
        "attention_type": "mla" if is_latent else "default",
        "dtypes": [random.choice(["float", "int8"])],
        "context": _instance(context),
        "generation": _instance(generation),
    }
    dp_ranks = {
        f"{side}_dp_rank": cut["dp_rank"] if cut["enable_attention_dp"] else None
        for side, cut in (("context", context), ("generation", generation))
    }
    request = {"id": 0, "length": random.randint(9, 24)} | dp_ranks
    step = {"op": "transfer_requests", "requests": [request], "repeat": 1}
    plan = _plan_of(config, dp_ranks)
    expect = {"expect": {"all_generation_blocks_match": True}, "expect_derived": {"plans": [dp_ranks | plan]}}
    return {"kind": "scenario", "config": config, "steps": [step | expect]}


def _instance(cut: Content) -> Content:
    kept = ("tp", "pp", "cp", "layers_per_pp", "enable_attention_dp")
    return {key: cut[key] for key in kept} | {"kv_heads_per_rank": cut["num_kv_heads"]}


def _plan_of(config: Content, dp_ranks: Content) -> Content:
    """The seed's answers, rank by rank."""
    found = seed_pair(config, dp_ranks)
    sides: dict[str, list[Content]] = {"senders": [], "receivers": []}
    for name, values in found.items():
        side, field = name.split(".")
        sides[side] = sides[side] or [{} for _ in values]
        for entry, value in zip(sides[side], values, strict=True):
            entry[field] = value
    return sides


def _function(name: str, args: Content, expect: Any) -> Content:
    return {"kind": "function", "fn": name, "args": args, "expect": expect}


QUESTIONS: dict[str, Callable[[Random], Content]] = {
    "ranks": _ranks,
    "picks": _picks,
    "sent": _sent,
    "received": _received,
    "support": _support,
    "windows": _windows,
    "equality": _equality,
    "buffers": _buffers,
    "pairs": _pairs,
}
