"""Random questions to the pure functions of the core, with the seed's answers as expectations.

In:  a random source and the name of a function.
Out: function cases as the files have them.
Law: every answer is the seed's formula as the specification writes it (core spec 1, 2, 7, 10.4, 11, 13), floats and
     defects included; nothing of kv_core is used but its rounding.
"""

import struct
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from contract.case import Case
from contract.naive_hash import naive_chain
from contract.seed_sequence import mm_keys, wishes_of
from kv_core.spans import ceil_div

Args = dict[str, Any]
ERROR = {"error": True}


def random_question(number: int, name: str) -> Case:
    """The question of this number to this function, always the same."""
    args = ARGUMENTS[name](Random(f"{name} {number}"))
    content = {"name": f"random-{name}-{number}", "kind": "function", "fn": name, "args": args}
    return Case("random", content | {"expect": ANSWERS[name](args)})


# Sizing.


def float_32(number: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def per_beam(length: int, sink: int, window: int, size: int) -> int:
    return ceil_div(min(length, window) + -sink % size, size) + int(length > window)


def whole(inp: int, out: int, sink: int, window: int, beams: int, size: int) -> int:
    """Core spec 11.4."""
    if beams == 1:
        return per_beam(inp + out, sink, window, size)
    if window <= out:
        return per_beam(out, sink, window, size) * beams
    context = min(window, inp + out) - out
    shared = (context + -sink % size) // size
    unshared = ceil_div(out + context - shared * size, size) + int(inp + out > window)
    return shared + unshared * beams


def attention_window(a: Args) -> int:
    """Core spec 11.5."""
    out, capacity, size = a["output_length"], a["block_capacity"], a["tokens_per_block"]
    needed = whole(0, out, a["sink_token_length"], out, a["beam_width"], size)
    if needed > capacity:
        return int(capacity // a["beam_width"] * size)
    return int(min(out + (capacity - needed) * size, a["input_length"] + out))


def batch_size(a: Args) -> int:
    lengths = (a["input_length"], a["output_length"], a.get("sink_token_length", 0))
    each = (
        blocks[0] // whole(*lengths, int(window), a["beam_width"], a["tokens_per_block"])
        for window, blocks in a["blocks_per_window"].items()
    )
    return int(min(each))


def groups(a: Args) -> dict[str, list[int]]:
    windows, found = a["max_attention_window_vec"], dict[str, list[int]]()
    for layer in range(a["num_layers"]):
        found.setdefault(str(windows[layer % len(windows)]), []).append(layer)
    return found


def window_shares(a: Args) -> Any:
    """Core spec 11.3, in 32-bit floats: a sum that is not exactly 1 is an error (D20)."""
    sizes = a["cache_size_per_token"]
    if len(sizes) == 1:
        return {"shares": dict.fromkeys(sizes, 1.0), "tolerance": 1e-6}
    total = sum(sizes.values())
    weights = {window: float_32(float_32(size / total) * int(window)) for window, size in sizes.items()}
    all_weights = 0.0
    for window in sorted(weights, key=int):
        all_weights = float_32(all_weights + weights[window])
    shares = {window: float_32(weight / all_weights) for window, weight in weights.items()}
    added = 0.0
    for window in sorted(shares, key=int):
        added = float_32(added + shares[window])
    return ERROR if added != 1.0 else {"shares": shares, "tolerance": 1e-5}


def num_blocks(a: Args) -> Any:
    """Core spec 11.2: shares of memory in 32-bit floats, rounded up."""
    sizes, size = a["cache_size_bytes_per_token_per_window"], a["tokens_per_block"]
    given = a.get("window_size_shares") or [1] * len(sizes)
    found = {}
    for window, number in zip(sorted(sizes, key=int), given, strict=True):
        share = float_32(number / sum(given))
        memory = float_32(float_32(a["primary_bytes"] - a["extra_cost_bytes"]) * share)
        tokens = int(memory / sizes[window])
        if len(sizes) == 1 and a.get("max_tokens") is not None:
            tokens = min(tokens, a["max_tokens"])
        secondary = int(float_32(float_32(a["secondary_bytes"]) * share) / sizes[window]) // size
        found[window] = [ceil_div(tokens, size), secondary]
    return found


# Retention and keys.


def retention(a: Args) -> Any:
    """Core spec 13.2; the decode priority is not looked at (D21)."""
    ranges = sorted(a["ranges"], key=lambda one: one["start"])
    for at, one in enumerate(ranges):
        following = ranges[at + 1]["start"] if at + 1 < len(ranges) else None
        stops_right = one["end"] is None if following is None else False
        stops_right = stops_right or (one["end"] is not None and one["start"] < one["end"])
        if following is not None and one["end"] is not None:
            stops_right = stops_right and one["end"] <= following
        if not (0 <= one["priority"] <= 100 and one["start"] >= 0 and stops_right):
            return ERROR
    told = [{key: one[key] for key in ("start", "end", "priority")} for one in ranges]
    return {"ranges": told, "decode_priority": a["decode_priority"]}


def per_block(a: Args) -> Any:
    wishes = wishes_of(a, a["block_size"], a["seq_len"])
    return {"priorities": [priority for priority, _ in wishes], "durations": [duration for _, duration in wishes]}


def chopped(a: Args) -> Any:
    if a["usable_size"] > len(a["vec"]):
        return ERROR
    usable, size = a["vec"][: max(0, a["usable_size"])], a["elements_per_block"]
    runs = [usable[at : at + size] for at in range(0, len(usable), size)]
    return [run for run in runs if len(run) == size or a["allow_partial"]]


def extra_keys(a: Args) -> Any:
    found = mm_keys(a["multimodal"], a["start_token"], a["end_token"])
    return [[b"".join(word.to_bytes(4, "big") for word in words).hex(), offset] for words, offset, _ in found]


def partial_match(a: Args) -> int:
    """Core spec 1.3: the flag of extra ids is not compared (D53)."""
    one, two = a["a"], a["b"]
    if any(one.get(name) != two.get(name) for name in ("lora_id", "salt", "mm_keys")):
        return 0
    pairs = ([*zip(key["tokens"], key.get("extra_ids") or [0] * 9, strict=False)] for key in (one, two))
    common = 0
    for mine, theirs in zip(*pairs, strict=False):
        if mine != theirs:
            break
        common += 1
    return common


# What is asked.


def _lengths(random: Random) -> Args:
    sizes: Args = {"input_length": random.randint(1, 400), "output_length": random.randint(1, 300)}
    sizes |= {"sink_token_length": 0, "beam_width": random.choice([1, 1, 2, 4])}
    return sizes | {"tokens_per_block": random.choice([1, 4, 16, 64])}


def _windows(random: Random) -> list[str]:
    return [str(window) for window in sorted(random.sample([8, 64, 512, 1024, 4096, 8192], random.randint(1, 3)))]


def _memory(random: Random) -> Args:
    windows = _windows(random)
    args: Args = {"cache_size_bytes_per_token_per_window": {window: random.randint(1, 5000) for window in windows}}
    args |= {"primary_bytes": random.randint(10_000, 10**9), "secondary_bytes": random.choice([0, 12_345_678])}
    args |= {"extra_cost_bytes": random.choice([0, 0, 5000]), "tokens_per_block": random.choice([1, 16, 32, 64])}
    if random.random() < 0.3:
        args["max_tokens"] = random.randint(1, 100_000)
    if random.random() < 0.3:
        args["window_size_shares"] = [random.choice([0.1, 0.25, 0.6, 1.0]) for _ in windows]
    return args


def _ranges(random: Random) -> Args:
    cuts = sorted(random.sample(range(60), 4))
    ranges = [
        {"start": start, "end": stop, "priority": random.choice([0, 35, 80, 100])}
        for start, stop in ((cuts[0], cuts[1]), (cuts[random.choice([1, 2])], random.choice([cuts[3], None])))
    ]
    for one in ranges:
        one |= {"duration_ms": random.choice([5, 20])} if random.random() < 0.4 else {}
    return {"ranges": ranges[: random.randint(1, 2)], "decode_priority": random.choice([0, 35, 100])}


def _wrong_ranges(random: Random) -> Args:
    args = _ranges(random)
    args["ranges"][0] |= random.choice([{}, {}, {"priority": 101}, {"end": 59}, {"end": None}, {"start": 59}])
    random.shuffle(args["ranges"])
    return args | {"decode_priority": random.choice([35, 100, 101, -1])}


def _key(random: Random) -> Args:
    tokens = [random.choice([1, 1, 2]) for _ in range(random.randint(0, 5))]
    key: Args = {"tokens": tokens}
    if random.random() < 0.2:
        key["extra_ids"] = [random.choice([0, 0, 7]) for _ in tokens]
    for name in ("lora_id", "salt"):
        if random.random() < 0.15:
            key[name] = random.choice([0, 1])
    if random.random() < 0.15:
        key["mm_keys"] = [[random.choice(["01", "02"]) * 32, random.choice([0, 3])]]
    return key


def _items(random: Random) -> Args:
    count, start = random.randint(0, 3), random.randrange(0, 24, 4)
    items = {
        "hashes": [[random.getrandbits(31)] * 8 for _ in range(count)],
        "positions": [random.randrange(20) for _ in range(count)],
        "lengths": [random.randint(1, 9) for _ in range(count - (random.random() < 0.1 and count > 1))],
    }
    return {"multimodal": items, "start_token": start, "end_token": start + 4}


ARGUMENTS: Mapping[str, Callable[[Random], Args]] = {
    "calculate_max_block_requirements_per_beam": lambda r: {
        "sequence_length": r.randint(1, 700),
        "sink_token_length": r.choice([0, 0, 64, 65]),
        "window_size": r.randint(1, 600),
        "tokens_per_block": r.choice([1, 16, 64]),
    },
    "calculate_max_block_requirements": lambda r: _lengths(r) | {"window_size": r.randint(1, 700)},
    "calculate_max_attention_window": lambda r: _lengths(r) | {"block_capacity": r.randint(1, 60)},
    "get_max_capacity_batch_size": lambda r: (
        _lengths(r) | {"blocks_per_window": {window: [r.randint(1, 900), 0] for window in _windows(r)}}
    ),
    "get_sink_bubble_length": lambda r: {"sink_token_length": r.randint(0, 200), "tokens_per_block": r.randint(1, 64)},
    "group_layers_by_window_size": lambda r: {
        "max_attention_window_vec": [r.choice([8, 16, 32]) for _ in range(r.randint(1, 5))],
        "num_layers": r.randint(1, 9),
    },
    "calculate_window_size_to_share": lambda r: (
        {"window_size_to_layers": {}, "cache_size_per_token": {window: r.randint(1, 9) for window in _windows(r)}}
    ),
    "calculate_max_num_blocks": _memory,
    "make_retention_config": _wrong_ranges,
    "get_per_block_retention": lambda r: _ranges(r) | {"block_size": r.randint(1, 20), "seq_len": r.randint(1, 70)},
    "chop_vector_into_blocks": lambda r: {
        "vec": list(range(r.randint(0, 20))),
        "usable_size": r.randint(-1, 12),
        "elements_per_block": r.randint(1, 6),
        "allow_partial": r.random() < 0.5,
    },
    "block_key_partial_match": lambda r: {"a": _key(r), "b": _key(r)},
    "block_key_equal": lambda r: {"a": _key(r), "b": _key(r)},
    "generate_block_hash_extra_keys": _items,
    "block_key_hash_chain": lambda r: {"keys": [_key(r) for _ in range(r.randint(1, 3))]},
}
ANSWERS: Mapping[str, Callable[[Args], Any]] = {
    "calculate_max_block_requirements_per_beam": lambda a: per_beam(
        a["sequence_length"], a["sink_token_length"], a["window_size"], a["tokens_per_block"]
    ),
    "calculate_max_block_requirements": lambda a: whole(
        a["input_length"], a["output_length"], 0, a["window_size"], a["beam_width"], a["tokens_per_block"]
    ),
    "calculate_max_attention_window": attention_window,
    "get_max_capacity_batch_size": batch_size,
    "get_sink_bubble_length": lambda a: -a["sink_token_length"] % a["tokens_per_block"],
    "group_layers_by_window_size": groups,
    "calculate_window_size_to_share": window_shares,
    "calculate_max_num_blocks": num_blocks,
    "make_retention_config": retention,
    "get_per_block_retention": per_block,
    "chop_vector_into_blocks": chopped,
    "block_key_partial_match": partial_match,
    "block_key_equal": lambda a: a["a"] == a["b"],
    "generate_block_hash_extra_keys": extra_keys,
    "block_key_hash_chain": lambda a: naive_chain(a["keys"]),
}
