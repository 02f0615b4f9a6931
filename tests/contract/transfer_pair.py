"""Requests moved between two instances of a case, as tagged elements.

In:  a scenario whose target is `transfer_pair`.
Out: observations: whether every element lies in its place at the receivers; what plans say of senders and receivers.
Law: bytes are really split and concatenated, in every element type the case names.
"""

from collections.abc import Iterator
from typing import Any

from contract.case import Case, UnknownKind
from contract.judge import Observation
from contract.naive_ranks import copies, our_pair, seed_pair
from kv_core.spans import Span
from kv_testing.carrier import carry
from kv_testing.tagged import FORMS, fill, make_world, misplaced
from kv_transfer.plan.cache_state import FULL, LATENT, BlockLayout, CacheState, ParallelLayout
from kv_transfer.plan.plan import receive_plans
from kv_transfer.plan.side_pools import indexer_pool
from kv_transfer.plan.targets import holding_ranks

Config = dict[str, Any]

HELPERS: Config = {"seed_pair": seed_pair, "our_pair": our_pair, "copies": copies}
"""What rules may use beside their case's values."""


def observe(case: Case) -> Iterator[Observation]:
    """Observations of one scenario."""
    config = case.content["config"]
    for ordinal, step in enumerate(case.content["steps"]):
        if step["op"] != "transfer_requests":
            raise UnknownKind(f"operation {step['op']!r}")
        known = HELPERS | {"config": config, "step": step}
        matches = all(_moves(config, step, dtype) for dtype in config["dtypes"])
        for field, expected in step["expect"].items():
            if field != "all_generation_blocks_match":
                raise UnknownKind(f"field {field!r}")
            yield Observation(step["op"], field, expected, matches, known, ordinal)
        yield from _plans(config, step, known, ordinal)


def _state(config: Config, side: str, dtype: str) -> CacheState:
    given = config[side]
    windows = config.get("attention_windows", ())
    layers = range(config["num_layers"])
    return CacheState(
        fingerprint="model",
        attention=LATENT if config["attention_type"] == "mla" else FULL,
        dtype={"float": "float32", "int8": "int8"}[dtype],
        head_size=config["size_per_head"],
        num_planes=config["kv_factor"],
        num_layers=config["num_layers"],
        num_kv_heads=config["num_kv_heads"],
        tokens_per_block=config["tokens_per_block"],
        layout=BlockLayout("head_major"),
        windows=tuple(windows[layer % len(windows)] for layer in layers) if windows else (),
        parallel=ParallelLayout.even(
            given["tp"],
            given["layers_per_pp"],
            config["num_kv_heads"],
            cp=given["cp"],
            groups=given["tp"] if given["enable_attention_dp"] else 1,
        ),
    )


def _moves(config: Config, step: Config, dtype: str) -> bool:
    states = [_state(config, side, dtype) for side in ("context", "generation")]
    pools = [states]
    if "indexer_k_cache" in config:
        indexer = config["indexer_k_cache"]
        pools.append([indexer_pool(one, indexer["index_head_dim"], indexer["quant_block_size"]) for one in states])
    return all(
        _is_moved(pool, request) for _ in range(step["repeat"]) for request in step["requests"] for pool in pools
    )


def _is_moved(states: list[CacheState], request: Config) -> bool:
    tokens = Span(0, request["length"])
    from_group, to_group = request.get("context_dp_rank") or 0, request.get("generation_dp_rank") or 0
    sender, receiver = (
        make_world(state, tokens.stop, FORMS["head_major"][0] if state.num_planes == 2 else "split BHTD", seed)
        for seed, state in enumerate(states)
    )
    fill(sender, tokens, from_group)
    carry(sender, receiver, tokens, from_group=from_group, to_group=to_group)
    return misplaced(receiver, tokens, to_group) == 0


def _plans(config: Config, step: Config, known: Config, ordinal: int) -> Iterator[Observation]:
    sender, receiver = (_state(config, side, config["dtypes"][0]) for side in ("context", "generation"))
    tokens = Span(0, max(request["length"] for request in step["requests"]))
    for plan in step.get("expect_derived", {}).get("plans", ()):
        groups = {"group": plan.get("context_dp_rank") or 0}
        to_group = plan.get("generation_dp_rank") or 0
        known_plan = known | {"plan": plan}
        found = _found(sender, receiver, tokens, groups["group"], to_group)
        for one in ("senders", "receivers"):
            fields = {field for entry in plan[one] for field in entry}
            for field in sorted(fields):
                expected = [entry.get(field) for entry in plan[one]]
                ours = [entry.get(field) for entry in found[one]]
                yield Observation(step["op"], f"{one}.{field}", expected, ours, known_plan, ordinal, derived=True)


def _found(sender: CacheState, receiver: CacheState, tokens: Span, from_group: int, to_group: int) -> Config:
    """What our plan says, in the words of the cases."""
    receivers, asked = [], set()
    for rank in receiver.parallel.ranks_of(to_group):
        share = receiver.share_of(rank)
        holding = holding_ranks(share, sender.parallel, from_group)
        unordered = receive_plans(receiver, rank, sender, tokens, group=from_group)
        plans = sorted(unordered, key=lambda plan, order=holding: order.index(plan.sender))  # type: ignore[misc]
        asked |= {plan.sender for plan in plans}
        parts = [
            {"from_rank": plan.sender, "layers": _ends(piece.layers), "heads": _ends(piece.heads)}
            for plan in plans
            for piece in plan.pieces
        ]
        receivers.append(
            {
                "rank": rank,
                "layers": _ends(share.layers),
                "heads": _ends(share.heads),
                "peer_ranks": list(holding),
                "picked": [holding.index(plan.sender) for plan in plans],
                "parts": parts,
            }
        )
    senders = [
        {
            "rank": rank,
            "need_send": rank in asked,
            "targets": list(holding_ranks(sender.share_of(rank), receiver.parallel, to_group)),
        }
        for rank in sender.parallel.ranks_of(from_group)
    ]
    return {"senders": senders, "receivers": receivers}


def _ends(span: Span) -> list[int]:
    return [span.start, span.stop]
