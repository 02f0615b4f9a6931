"""Which blocks travel, worked out twice beside a scenario: by the seed's rules, and by ours.

In:  the models of both managers (`seed_manager`, `our_model`) and a step that asks for a range.
Out: `block_ids_per_window`, or the blocks of a sequence; NoFreeBlock where the answer is a refusal.
Law: nothing of the code under test is used. The seed: transfer spec 5.2, 5.3; ours: 5.11, 5.12, from the tokens asked.
"""

from collections.abc import Callable, Mapping
from typing import Any

from contract.our_model import OurManager
from contract.our_window import HOLE, common
from contract.seed_manager import SeedManager
from contract.seed_model import Block, Key, NoFreeBlock

Step = dict[str, Any]
Answer = dict[str, Any]


def seed_sending(model: SeedManager, step: Step) -> Answer:
    """All blocks or the tails of windows; with reuse, those that the tree finds by a key."""
    tokens, has_cp = step["last_block_key_tokens"], step["recv_side_has_cp"]
    if len(model.windows) > 1 or not model.config["enable_block_reuse"] or not tokens or has_cp:
        return _all_or_tails(model, step)
    found = model.op_find_blocks_in_reuse_tree({"tokens": tokens})
    wanted = step["index_from_end"] + 1
    if not found["found"] or wanted > len(found["chain_block_ids"]):
        raise NoFreeBlock
    return {"block_ids_per_window": {str(model.windows[0].window): found["chain_block_ids"][-wanted:]}}


def seed_receiving(model: SeedManager, step: Step) -> Answer:
    """All blocks or the tails of windows; with reuse, those of the prompt that are not there yet, but at least one."""
    one = model.requests[step["request_id"]]
    if len(model.windows) > 1 or not step["src_enable_block_reuse"] or step["recv_side_has_cp"]:
        return _all_or_tails(model, step)
    ids = model.windows[0].held[one.request_id].beams[0]
    used = min(-(-_prompt_length(one) // model.size), len(ids))
    reused = min(one.prepopulated // model.size, used)
    return {"block_ids_per_window": {str(model.windows[0].window): ids[reused:used] or ids[used - 1 : used]}}


def _all_or_tails(model: SeedManager, step: Step) -> Answer:
    found = {}
    whole = len(model.windows) == 1 or step.get("transfer_all_blocks_for_window") or step["recv_side_has_cp"]
    for window in model.windows:
        ids = window.held[step["request_id"]].beams[0]
        start = 0 if whole else max(0, len(ids) - (window.window // model.size + 1))
        found[str(window.window)] = ids[start:]
    return {"block_ids_per_window": found}


def seed_blocks(model: SeedManager, step: Step) -> Answer:
    """The blocks of a sequence, all of which must lie in primary memory."""
    window = model.windows[0]
    ids = window.held[step["request_id"]].beams[0]
    if any(window.blocks[number].level for number in ids):
        raise NoFreeBlock
    return {"block_ids": ids, "num_blocks": len(ids)}


def our_sending(model: OurManager, step: Step) -> Answer:
    """The asked tokens, from the request's own blocks while it has them, otherwise from the tree by equal content."""
    one, tokens = model.requests[step["request_id"]], step["last_block_key_tokens"]
    told = [token for token, _ in one.tokens]
    if not tokens:
        first, stop = 0, _prompt_length(one)
    else:
        stop = len(tokens)
        first = (-(-stop // model.size) - step["index_from_end"] - 1) * model.size
    is_own = one.request_id in model.tables and told[:stop] == (tokens or told[:stop])
    if first < 0 or (not is_own and not tokens):
        raise NoFreeBlock
    return _per_window(model, first, stop, [_own(model, one, at) if is_own else _stored(model, tokens, at)
                                            for at in range(len(model.windows))])  # fmt: skip


def our_receiving(model: OurManager, step: Step) -> Answer:
    """The tokens of the prompt that are not there yet."""
    one = model.requests[step["request_id"]]
    tables = [_own(model, one, at) for at in range(len(model.windows))]
    return _per_window(model, one.prepopulated, _prompt_length(one), tables)


def our_blocks(model: OurManager, step: Step) -> Answer:
    """The blocks of a sequence, which are always on the device."""
    ids = _own(model, model.requests[step["request_id"]], 0)
    return {"block_ids": ids, "num_blocks": len(ids)}


def _per_window(model: OurManager, first: int, stop: int, tables: list[list[int | None]]) -> Answer:
    """Of a sliding window only what the token after the span sees."""
    found = {}
    for window, ids in zip(model.windows, tables, strict=True):
        start = max(first, stop - window.window + 1) if window.is_sliding else first
        wanted = range(start // model.size, -(-stop // model.size)) if start < stop else range(0)
        if any(at >= len(ids) or ids[at] is None for at in wanted):
            raise NoFreeBlock
        found[str(window.window)] = [ids[at] for at in wanted]
    return {"block_ids_per_window": found}


def _own(model: OurManager, one: Any, number: int) -> list[int | None]:
    return [None if block is None else block.block_id for block in model.tables[one.request_id][number][0]]


def _stored(model: OurManager, tokens: list[int], number: int) -> list[int | None]:
    """The chain of blocks whose content is that of these tokens; as far as there is one."""
    window, one = model.windows[number], model._new({"request_id": -1}, {"tokens": tokens})
    cursor, ids = window.root, list[int | None]()
    for key in one.keys(len(tokens), model.size, True):
        is_whole = len(key.tokens) == model.size
        found = cursor.children.get(key) if is_whole else _fullest(cursor, key)
        if found is None:
            break
        ids.append(None if found.block_id == HOLE else found.block_id)
        cursor = found
    return ids


def _fullest(parent: Block, key: Key) -> Block | None:
    """The child that begins with all of these tokens; of several the one that a match would take (D41)."""
    begins = [
        block
        for block in parent.children.values()
        if block.block_id != HOLE and common(block.key, key) == len(key.tokens)
    ]
    return max(begins, key=lambda block: (-block.level, block.used, -block.block_id), default=None)


def _prompt_length(one: Any) -> int:
    return len((one.content or {}).get("tokens", ())) or int(one.num_tokens)


SEED: Mapping[str, Callable[[SeedManager, Step], Answer]] = {
    "block_range_for_sending": seed_sending,
    "block_range_for_receiving": seed_receiving,
    "iterate_sequence_blocks": seed_blocks,
}
OURS: Mapping[str, Callable[[OurManager, Step], Answer]] = {
    "block_range_for_sending": our_sending,
    "block_range_for_receiving": our_receiving,
    "iterate_sequence_blocks": our_blocks,
}
