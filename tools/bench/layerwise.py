"""From the end of a prompt's computation to its last block: layer by layer, chunk by chunk, or whole.

In:  two processes on one CPU, NIXL over shared memory; an engine that computes nothing, a layer in some milliseconds.
Out: the seconds after the last layer, in turns A B B A; `results/layerwise.jsonl`, whose line is the last one printed.
Law: the bytes that came are compared with those sent before anything is timed. Both arms share one machine and its
     noise: only their ratio means anything.

    python tools/bench/layerwise.py [--rounds 10] [--layer-ms 2] [--layers-per-chunk 4]
"""

import argparse
import multiprocessing as mp
import secrets
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from kv_engine_adapter.cli.bench_pair import LAYERS, LOAD_S, PROMPT, START_S, Case, Ranks

RESULTS = Path(__file__).parent / "results" / "layerwise.jsonl"
STEP, TOKENS = 256, 512
"""Tokens of a step, and of a prompt: eight chunks of 8 MiB in two steps."""
OURS, THEIRS, WHOLE = "layer-wise", "chunk-wise", "whole"


def serve(pipe: Connection, case: Case, layer_s: float) -> None:
    """The engine that computes: told an arm and a transfer, it answers when its prompt is computed (time.monotonic)."""
    from kv_transfer.instance import InstanceDoor
    from kv_transfer.orders import BlockTables, Offer
    from kv_transfer.plan.frontier import Ahead

    ranks = Ranks("sender", case.theirs, case, "cpu")
    ranks.fill()
    (rank,), tables = ranks.transceivers, (ranks.tables[0],)
    door = InstanceDoor(ranks.config, "sender", "sender")  # type: ignore[arg-type]
    door.set_cards([rank.card])
    pipe.send(door.address)
    while (told := pipe.recv()) is not None:
        arm, transfer = told
        door.open_offer(transfer, transfer, PROMPT)
        rank.offer(Offer(transfer, transfer, PROMPT, BlockTables(TOKENS, tables), 0))
        for start in range(0, TOKENS, STEP):
            for layer in range(1, LAYERS + 1):
                time.sleep(layer_s)
                if arm == OURS and layer < LAYERS:
                    rank.advance(transfer, start, tables, Ahead(layer, start + STEP))
            if arm != WHOLE or start + STEP == TOKENS:
                rank.advance(transfer, start + STEP, tables)
        pipe.send(time.monotonic())
        rank.complete(transfer)
        pipe.recv()  # that it is loaded
        rank.settle(transfer, transfer, "the end of a round")
        rank.poll()
    ranks.close()
    door.close()


class Receiver:
    """One rank that loads prompts while they are computed."""

    def __init__(self, name: str, case: Case, pipe: Connection, address: tuple[str, int]) -> None:
        self.ranks, self._pipe, self._address = Ranks(name, case.ours, case, "cpu"), pipe, address

    def load(self, arm: str) -> float:
        """Seconds from the end of the computation to the last block."""
        from kv_core.ids import RequestId, TransferId
        from kv_core.spans import Span
        from kv_transfer.orders import BlockTables, ReceiveOrder

        (rank,), transfer = self.ranks.transceivers, secrets.token_hex(16)
        tables = BlockTables(TOKENS, (self.ranks.tables[0],))
        name, wanted = (RequestId(transfer), TransferId(transfer)), Span(0, TOKENS)
        rank.receive(ReceiveOrder(*name, PROMPT, wanted, tables, *self._address))
        self._pipe.send((arm, transfer))
        while not (received := rank.poll().received):
            time.sleep(0.0002)
        loaded_at = time.monotonic()
        assert received[0].ok, received[0].reason
        assert self._pipe.poll(LOAD_S), "the sender does not answer"
        computed_at = float(self._pipe.recv())
        self._pipe.send("loaded")
        return loaded_at - computed_at

    def prove(self, arm: str) -> None:
        """Once to connect, once to compare."""
        self.load(arm)
        self.ranks.clear()
        self.load(arm)
        self.ranks.check()


def rounds(count: int, receivers: dict[str, Receiver]) -> list[dict[str, dict[str, float]]]:
    """Of each pair of turns what either arm took; the third arm after every pair."""
    found = []
    for number in range(count):
        arms = (OURS, THEIRS) if number % 2 == 0 else (THEIRS, OURS)
        found.append({arm: {"after the end, s": receivers[arm].load(arm)} for arm in (*arms, WHOLE)})
    return found


def main() -> None:
    from turns import tell

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layer-ms", type=float, default=2.0)
    parser.add_argument("--layers-per-chunk", type=int, default=4)
    options = parser.parse_args()
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    usual = {"direct": False, "chunk_bytes": 8 << 20}
    by_layers: dict[str, Any] = usual | {"layers_per_chunk": options.layers_per_chunk}
    plain = Case(tokens=TOKENS, settings=usual)
    sender = context.Process(target=serve, args=(theirs, plain, options.layer_ms / 1000), daemon=True)
    sender.start()
    theirs.close()
    assert ours.poll(START_S), "the sender does not start"
    address = ours.recv()
    made = [
        Receiver(OURS, Case(tokens=TOKENS, settings=by_layers), ours, address),
        Receiver(THEIRS, plain, ours, address),
    ]
    receivers = {OURS: made[0], THEIRS: made[1], WHOLE: made[1]}
    try:
        for arm, receiver in receivers.items():
            receiver.prove(arm)
        pairs = rounds(options.rounds, receivers)
    finally:
        for each in made:
            each.ranks.close()
        with suppress(OSError):
            ours.send(None)
        sender.join(20)
        sender.kill()
    whole = median(pair[WHOLE]["after the end, s"] for pair in pairs)
    claim = (
        f"{options.layers_per_chunk} layers a chunk, {options.layer_ms:g} ms a layer: what is left after the last one"
    )
    arms = OURS, THEIRS
    tell(claim, pairs, arms, lambda _, one, other: other / one, RESULTS, whole=round(whole, 4))


if __name__ == "__main__":
    main()
