"""Cache states of the cases as ours.

In:  cache states as cases write them: heads per rank, sizes of the parallel dimensions.
Out: CacheStates and ParallelLayouts; the groups and the length that the questions are asked with.
Law: this only translates. How many heads the model has is told by neither side alone where ranks hold one head each:
     of all numbers that fit both sides the largest is taken, and each side's own where none does.
"""

from math import lcm
from typing import Any

from kv_core.errors import CallerError
from kv_transfer.plan.cache_state import FULL, LATENT, BlockLayout, CacheState, ParallelLayout
from kv_transfer.plan.compatibility import reasons
from kv_transfer.plan.context import ContextCut

Args = dict[str, Any]

DTYPES = {"float": "float32", "half": "float16", "bf16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn"}


def pair_of(args: Args) -> tuple[CacheState, CacheState]:
    """The states of `self` and `peer`, as they stand; CallerError if one of them can be no cache."""
    mine, theirs = possible_heads(args["self"]), possible_heads(args["peer"])
    common = max(set(mine) & set(theirs), default=None)
    return state_of(args["self"], common or max(mine)), state_of(args["peer"], common or max(theirs))


def exchanging_pair(args: Args) -> tuple[CacheState, CacheState]:
    """The same for questions about an exchange; CallerError with all reasons if the two cannot exchange.

    A latent cache has one head for us, which every rank holds whole: what the cases call its heads makes it longer.
    """
    for side in ("self", "peer"):
        if len(args[side]["layers_per_pp"]) != args[side]["pp"]:
            raise CallerError(f"not every stage tells its layers: stages={args[side]['pp']}, side={side}")
    ours, peer = pair_of({side: _one_latent_head(args[side]) for side in ("self", "peer")})
    found = reasons(ours, peer)
    if found:
        raise CallerError("; ".join(map(str, found)))
    return ours, peer


def state_of(given: Args, num_heads: int | None = None, cut: ContextCut = "contiguous") -> CacheState:
    """One side; CallerError if its layers have different numbers of heads, or its numbers contradict each other."""
    if num_heads is None:
        num_heads = max(possible_heads(given))
    # A list that is shorter than the stages names those that hold layers.
    stages = given["layers_per_pp"] + [0] * (given["pp"] - len(given["layers_per_pp"]))
    groups = given["dp_size"] if given["enable_attention_dp"] else 1
    return CacheState(
        fingerprint="model",
        attention=LATENT if given["attention_type"] == "mla" else FULL,
        dtype=DTYPES[given["dtype"]],
        head_size=given["size_per_head"],
        num_planes=given["kv_factor"],
        num_layers=given["num_layers"],
        num_kv_heads=num_heads,
        tokens_per_block=given["tokens_per_block"],
        layout=BlockLayout("head_major"),
        parallel=ParallelLayout.even(given["tp"], stages, num_heads, cp=given["cp"], context_cut=cut, groups=groups),
    )


def possible_heads(given: Args) -> list[int]:
    """How many heads the whole model may have, ascending."""
    per_rank = given["num_kv_heads"]
    if isinstance(per_rank, list):
        if len(set(per_rank)) != 1:
            raise CallerError(f"layers have different numbers of heads: got={per_rank}")
        per_rank = per_rank[0]
    if given["attention_type"] == "mla":
        return [per_rank]
    width = given["tp"] // (given["dp_size"] if given["enable_attention_dp"] else 1)
    return [per_rank * width] if per_rank > 1 else [heads for heads in range(1, width + 1) if width % heads == 0]


def group_of(args: Args, side: str) -> int:
    """The group that holds the request."""
    given = args[side]
    group = args.get(f"{side}_dp_rank", given["dp_rank"])
    return group or 0 if given["enable_attention_dp"] else 0


def even_length(args: Args) -> int:
    """Tokens of a sequence of which every context rank of either side holds as many blocks as its fellows."""
    blocks = lcm(args["self"]["cp"], args["peer"]["cp"])
    return int(blocks * lcm(args["self"]["tokens_per_block"], args["peer"]["tokens_per_block"]))


def _one_latent_head(given: Args) -> Args:
    if given["attention_type"] != "mla" or isinstance(given["num_kv_heads"], list):
        return given
    return given | {"num_kv_heads": 1, "size_per_head": given["size_per_head"] * given["num_kv_heads"]}
