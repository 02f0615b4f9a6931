"""Function cases: each pure function of the format, called on ours.

In:  a function case.
Out: observations of its result, one for each field that is expected.
Law: a call that raises gives RAISED for every field; a function that is not listed here is unknown.
"""

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from contract import transfer_functions
from contract.case import Case, UnknownKind
from contract.judge import RAISED, Observation
from contract.naive_exchange import HELPERS as EXCHANGE_HELPERS
from contract.naive_policy import naive_policy
from kv_core.content import BlockContent, ItemPart, chop, item_parts
from kv_core.errors import FerryError
from kv_core.retention import RangeRetention, RetentionConfig
from kv_core.seed_hash import seed_hash_chain
from kv_core.sizing import (
    Budget,
    NumBlocks,
    SequenceShape,
    blocks_for_memory,
    blocks_per_beam,
    explicit_shares,
    largest_batch,
    largest_window,
    proportional_shares,
    sink_bubble,
)
from kv_core.spans import Span, ceil_div
from kv_core.spec import CacheSpec

Args = dict[str, Any]


def observe(case: Case) -> Iterator[Observation]:
    """Observations of one function case, check by check."""
    name = case.content["fn"]
    if name not in FUNCTIONS:
        raise UnknownKind(f"function {name!r}")
    common = case.content.get("args", {})
    checks = case.content.get("checks") or [case.content]
    for check in checks:
        args = common | check.get("args", {})
        yield from _observe_call(name, args, check["expect"])
        if "expect_derived" in check:
            derived = _observe_call(name, args, check["expect_derived"])
            yield from (replace(seen, derived=True) for seen in derived)


def _observe_call(name: str, args: Args, expect: Any) -> Iterator[Observation]:
    known = HELPERS | EXCHANGE_HELPERS | {"args": args}
    must_raise = isinstance(expect, dict) and expect.get("error", False)
    actual = _call(name, args, expect)
    yield Observation(name, "error", bool(must_raise), actual is RAISED, known)
    if must_raise:
        return
    tolerance = expect.get("tolerance", 1e-9) if isinstance(expect, dict) else 1e-9
    for field, expected in _fields(expect).items():
        value = RAISED if actual is RAISED else actual.get(field, "no such field")
        yield Observation(name, field, expected, value, known, tolerance=tolerance)


def _call(name: str, args: Args, expect: Any) -> Any:
    try:
        result = FUNCTIONS[name](args)
    except FerryError:
        return RAISED
    return result if _is_record(expect) else {"value": result}


def _fields(expect: Any) -> dict[str, Any]:
    if not _is_record(expect):
        return {"value": expect}
    return {field: value for field, value in expect.items() if field not in ("tolerance", "error")}


def _is_record(expect: Any) -> bool:
    """Whether an expectation names fields; maps of windows (decimal keys) are one value."""
    return isinstance(expect, dict) and not all(key.isdecimal() for key in expect)


def _shape(args: Args) -> SequenceShape:
    return SequenceShape(
        args["input_length"], args["output_length"], args.get("beam_width", 1), args.get("sink_token_length", 0)
    )


def _retention(args: Args) -> RetentionConfig:
    ranges = (
        RangeRetention(one["start"], one.get("end"), one.get("priority", 35), one.get("duration_ms"))
        for one in args.get("ranges", [])
    )
    return RetentionConfig(tuple(ranges), args.get("decode_priority", 35), args.get("decode_duration_ms"))


def _content(key: Args) -> BlockContent:
    extra_ids = key.get("extra_ids")
    return BlockContent(
        tuple(key["tokens"]),
        None if extra_ids is None else tuple(extra_ids),
        key.get("lora_id"),
        key.get("salt"),
        tuple(ItemPart(bytes.fromhex(digest), offset) for digest, offset in key.get("mm_keys") or ()),
    )


def _retention_config(args: Args) -> Args:
    config = _retention(args)
    ranges = [{"start": one.start, "end": one.stop, "priority": one.priority} for one in config.ranges]
    return {"ranges": ranges, "decode_priority": config.decode_priority}


def _per_block_retention(args: Args) -> Args:
    wishes = _retention(args).per_block(args["block_size"], args["seq_len"])
    durations = [wish.duration_ms for wish in wishes]
    return {"priorities": [wish.priority for wish in wishes], "durations": durations, "durations_ms": durations}


def _layers_by_window(args: Args) -> Any:
    windows = args["max_attention_window_vec"]
    spec = CacheSpec.uniform(
        num_layers=args["num_layers"], num_heads=1, head_size=1, dtype="uint8", tokens_per_block=1, windows=windows
    )
    return {window: list(layers) for window, layers in spec.groups().items()}


def _window_shares(args: Args) -> Args:
    bytes_by_window = {int(window): size for window, size in args["cache_size_per_token"].items()}
    shares = proportional_shares(bytes_by_window)
    total = next((args[key] for key in ("total_blocks", "num_blocks", "total") if key in args), 0)
    return {
        "shares": {window: float(share) for window, share in shares.items()},
        "rounded_blocks": {window: math.floor(share * total + 0.5) for window, share in shares.items()},
    }


def _max_num_blocks(args: Args) -> Any:
    tokens = args["tokens_per_block"]
    block_bytes = {int(w): size * tokens for w, size in args["cache_size_bytes_per_token_per_window"].items()}
    budget = Budget(args["primary_bytes"], args["secondary_bytes"]).without(args.get("extra_cost_bytes", 0))
    numbers = args.get("window_size_shares")
    found = blocks_for_memory(
        block_bytes,
        budget,
        tokens_per_block=tokens,
        shares=None if numbers is None else explicit_shares(block_bytes, numbers),
        max_tokens=args.get("max_tokens"),
    )
    return {window: [blocks.primary, blocks.secondary] for window, blocks in found.items()}


def _extra_keys(args: Args) -> Any:
    items = args["multimodal"] or {}
    digests, positions, lengths = (items.get(key) or [] for key in ("hashes", "positions", "lengths"))
    parts = item_parts(digests, positions, lengths, Span(args["start_token"], args["end_token"]))
    return [[part.digest.hex(), part.offset] for part in parts]


def _chopped(args: Args) -> Any:
    runs = chop(args["vec"], args["usable_size"], args["elements_per_block"], allow_partial=args["allow_partial"])
    return [list(run) for run in runs]


def _largest_batch(args: Args) -> int:
    blocks = {int(window): NumBlocks(*numbers) for window, numbers in args["blocks_per_window"].items()}
    return largest_batch(_shape(args), blocks, args["tokens_per_block"])


FUNCTIONS: dict[str, Callable[[Args], Any]] = {
    "calculate_max_block_requirements_per_beam": lambda a: blocks_per_beam(
        a["sequence_length"], a["window_size"], a["tokens_per_block"], a["sink_token_length"]
    ),
    "calculate_max_block_requirements": lambda a: _shape(a).num_blocks(a["window_size"], a["tokens_per_block"]),
    "calculate_max_attention_window": lambda a: largest_window(_shape(a), a["block_capacity"], a["tokens_per_block"]),
    "get_max_capacity_batch_size": _largest_batch,
    "get_sink_bubble_length": lambda a: sink_bubble(a["sink_token_length"], a["tokens_per_block"]),
    "group_layers_by_window_size": _layers_by_window,
    "calculate_window_size_to_share": _window_shares,
    "calculate_max_num_blocks": _max_num_blocks,
    "make_retention_config": _retention_config,
    "get_per_block_retention": _per_block_retention,
    "chop_vector_into_blocks": _chopped,
    "block_key_partial_match": lambda a: _content(a["a"]).common_prefix(_content(a["b"])),
    "block_key_equal": lambda a: _content(a["a"]) == _content(a["b"]),
    "generate_block_hash_extra_keys": _extra_keys,
    "block_key_hash_chain": lambda a: [f"0x{one:016x}" for one in seed_hash_chain(map(_content, a["keys"]))],
    **transfer_functions.FUNCTIONS,
}


def float_32(number: float) -> float:
    """The nearest 32-bit float."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def _seed_requirement(inp: int, out: int, sink: int, window: int, beams: int, tokens: int) -> int:
    """Blocks of a sequence, as rules spell it (core spec 11.4)."""
    return SequenceShape(inp, out, beams, sink).num_blocks(window, tokens)


HELPERS: dict[str, Any] = {
    "RAISED": RAISED,
    "ceil_div": ceil_div,
    "float_32": float_32,
    "fraction": lambda number: Fraction(str(number)),
    "max_blocks": _seed_requirement,
    "naive_policy": naive_policy,
}
"""What rules may use beside their case's values."""
