"""`kvferry explain`: which rank would send what to which, for a pair of engines that need not exist.

In:  two shapes (`shapes`), a model (`model_facts`), the tokens of a request.
Out: every session of one request as a table, a drawing of who sends which part, bytes; or why the two cannot exchange.
Law: what is shown is what the plan says; nothing is computed here but sums. Exit status 1 if the pair is refused.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import Span
from kv_engine_adapter.cli.model_facts import model_facts
from kv_engine_adapter.cli.shapes import cache_state
from kv_transfer.config import default_chunk_bytes
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.plan.compatibility import is_converted, reasons
from kv_transfer.plan.elements import shown
from kv_transfer.plan.plan import SessionPlan, chunks_of, receive_plans

MAX_SHOWN = 64
"""Lines of the table; the rest is counted."""
MAX_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines, and what one request moves between them."""

    sender: CacheState
    receiver: CacheState
    tokens: Span
    plans: tuple[SessionPlan, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 if the two cannot exchange; 2 for words that cannot be understood."""
    parser = argparse.ArgumentParser(
        prog="kvferry explain",
        description="Show which ranks of one engine send what to which ranks of another.",
        epilog="A shape: tp4pp2; tp8cp2,cut=round_robin; tp2,stages=20+12,block=64,order=token_major,dtype=float16.",
    )
    parser.add_argument("--from", dest="sender", required=True, metavar="SHAPE", help="the prefill engine")
    parser.add_argument("--to", dest="receiver", required=True, metavar="SHAPE", help="the decode engine")
    parser.add_argument("--model", required=True, help="config.json, its folder, or layers=32,heads=8,size=128")
    parser.add_argument("--tokens", type=int, default=1024, help="length of the prompt (default 1024)")
    parser.add_argument("--held", type=int, default=0, help="tokens that the decode engine holds already (default 0)")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.tokens > MAX_TOKENS:
            raise CallerError(f"tokens is too large: got={chosen.tokens}, most={MAX_TOKENS}")
        model = model_facts(chosen.model)
        sender, receiver = (cache_state(word, model) for word in (chosen.sender, chosen.receiver))
        found = reasons(receiver, sender)
        if found:
            print(f"{chosen.sender} and {chosen.receiver} cannot exchange:")
            print(*(f"  {reason}" for reason in found), sep="\n")
            return 1
        print(explained(pair_of(sender, receiver, Span(chosen.held, chosen.tokens))))
    except CallerError as error:
        print(f"kvferry explain: {error}", file=sys.stderr)
        return 2
    return 0


def pair_of(sender: CacheState, receiver: CacheState, tokens: Span) -> Pair:
    """All that every rank of the first group of the receiver takes from the first group of the sender."""
    plans = (
        plan
        for rank in receiver.parallel.ranks_of(0)
        for plan in receive_plans(receiver, rank, sender, tokens, num_tokens=tokens.stop)
    )
    return Pair(sender, receiver, tokens, tuple(plans))


def explained(pair: Pair) -> str:
    """The whole page."""
    return "\n\n".join(
        ["\n".join(_sides(pair)), "\n".join(_table(pair)), "\n".join(_drawing(pair)), "\n".join(_sums(pair))]
    )


def _sides(pair: Pair) -> Iterator[str]:
    for name, state in (("from", pair.sender), ("to", pair.receiver)):
        parallel, layout = state.parallel, state.layout
        cut = (
            f", {parallel.num_context_ranks} context ranks {parallel.context_cut}"
            if parallel.num_context_ranks > 1
            else ""
        )
        groups = f", {parallel.num_groups} groups of tensor ranks" if parallel.num_groups > 1 else ""
        scales = f" (scale {shown(state.scales)})" if state.scales else ""
        yield (
            f"{name:5}{parallel.num_ranks} ranks: {len(parallel.layers)} stages x {len(parallel.heads)} tensor ranks"
            f"{cut}{groups}; blocks of {state.tokens_per_block} tokens, {layout.order}, {state.dtype}"
            f"{scales}"
        )


def _table(pair: Pair) -> Iterator[str]:
    yield f"{'from':>5} {'to':>5}  {'layers':12} {'heads':10} {'tokens':16} {'bytes':>14}"
    rows = [row for plan in pair.plans for row in _rows(plan)]
    for row in rows[:MAX_SHOWN]:
        yield "{:>5} {:>5}  {:12} {:10} {:16} {:>14}".format(*row)
    if len(rows) > MAX_SHOWN:
        yield f"... and {len(rows) - MAX_SHOWN} more lines"


def _rows(plan: SessionPlan) -> Iterator[tuple[str, ...]]:
    """One line for each box of layers and heads; its runs of tokens together."""
    boxes: dict[tuple[Span, Span], list[Span]] = defaultdict(list)
    for piece in plan.pieces:
        boxes[piece.layers, piece.heads].append(piece.tokens or plan.tokens)
    for number, ((layers, heads), runs) in enumerate(boxes.items()):
        tokens = str(runs[0]) if len(runs) == 1 else f"{len(runs)} runs"
        num_bytes = f"{plan.num_bytes:,}" if number == 0 else ""
        yield f"P{plan.sender}", f"D{plan.receiver}", str(layers), str(heads), tokens, num_bytes


def _drawing(pair: Pair) -> Iterator[str]:
    """Layers downwards, heads to the right, cut wherever either side cuts; in each cell who sends to whom."""
    rows, columns = (list(pairwise(sorted(cuts))) for cuts in _cuts(pair))
    cells = [[_cell(pair, Span(*row), Span(*column)) for column in columns] for row in rows]
    words = [cell for line in cells for cell in line] + [str(Span(*column)) for column in columns]
    width = max(map(len, words)) + 2
    rule = " " * 10 + "+" + "+".join("-" * width for _ in columns) + "+"
    yield f"{'layers':>9}  " + " ".join(str(Span(*column)).center(width) for column in columns) + "  heads"
    yield rule
    for row, line in zip(rows, cells, strict=True):
        yield f"{Span(*row)!s:>9} |" + "|".join(cell.center(width) for cell in line) + "|"
        yield rule


def _cuts(pair: Pair) -> tuple[set[int], set[int]]:
    boxes = [(piece.layers, piece.heads) for plan in pair.plans for piece in plan.pieces]
    layers = {bound for box, _ in boxes for bound in (box.start, box.stop)} or {0, pair.sender.num_layers}
    heads = {bound for _, box in boxes for bound in (box.start, box.stop)} or {0, pair.sender.num_kv_heads}
    return layers, heads


def _cell(pair: Pair, layers: Span, heads: Span) -> str:
    """The sessions that carry this part: P0>D0 P1>D1; nothing if no token of it travels."""
    routes: dict[tuple[Rank, Rank], None] = {
        (plan.sender, plan.receiver): None
        for plan in pair.plans
        for piece in plan.pieces
        if piece.layers.covers(layers) and piece.heads.covers(heads)
    }
    return " ".join(f"P{sender}>D{receiver}" for sender, receiver in routes)


def _sums(pair: Pair) -> Iterator[str]:
    total = sum(plan.num_bytes for plan in pair.plans)
    chunk_bytes = default_chunk_bytes("cuda")
    chunks = sum(len(chunks_of(plan.pieces, plan.tokens, pair.sender, chunk_bytes)) for plan in pair.plans)
    yield (
        f"{len(pair.tokens):,} tokens: {total:,} bytes in {len(pair.plans)} sessions, {chunks} chunks of at most "
        f"{chunk_bytes >> 20} MiB"
    )
    busiest = max((sum(p.num_bytes for p in pair.plans if p.sender == s.sender) for s in pair.plans), default=0)
    yield f"the busiest sender gives {busiest:,} bytes"
    if is_converted(pair.receiver, pair.sender):
        yield (
            f"elements: {pair.sender.dtype} on the wire, converted to {pair.receiver.dtype} by the receiver; "
            "never read where they lie"
        )
        direct = ""
    else:
        direct = ", or direct (one kernel reads the sender's blocks) between GPUs of one host"
    yield f"path: staged (gather, one write a chunk, scatter){direct}; one run in memory is {_run_bytes(pair):,} bytes"


def _run_bytes(pair: Pair) -> int:
    """The shortest run that lies in one piece on both sides: a token of one head, or more where blocks allow it."""
    sender, receiver = pair.sender, pair.receiver
    tokens = min(sender.tokens_per_block, receiver.tokens_per_block)
    if sender.layout.order != receiver.layout.order:
        return sender.bytes_per_token_head
    heads = min((len(piece.heads) for plan in pair.plans for piece in plan.pieces), default=1)
    whole = all(len(span) == heads for state in (sender, receiver) for span in state.parallel.heads)
    if sender.layout.order == "head_major":
        return (
            tokens
            * sender.bytes_per_token_head
            * (heads if whole and sender.tokens_per_block == receiver.tokens_per_block else 1)
        )
    return heads * sender.bytes_per_token_head * (tokens if whole else 1)
