"""Hand-over between pools of two processes over NIXL on a CPU: every path of ours, and one descriptor a block.

In:  sizes of a block's run in KiB, bytes to move, UCX transports ("shm" lets UCX choose, "tcp" allows TCP alone).
Out: GB/s of each path at each size, `results/transfer.csv`; two JSON lines. The last one: the smallest ratio, over
     sizes and transports, of the path that is chosen to one NIXL read with a descriptor a block (from lists prepared
     before, as vLLM's NIXL connector does it). The one before it: the same for blocks of an engine, which are always
     staged.
Law: all paths move the same bytes between the same blocks in one run, one after the other, again and again; every
     result is compared with what the sender holds.

    python tools/bench/transfer.py [--mib 1024] [--sizes 4 32 256] [--transports shm tcp] [--repeats 5] [--chunks 2 4]
"""

import argparse
import csv
import json
import multiprocessing as mp
import os
import random
import secrets
import subprocess
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from plain_nixl import Blocks, Plain

RESULTS = Path(__file__).parent / "results" / "transfer.csv"
NUM_LAYERS, TOKENS, HEAD_SIZE, ITEM = 16, 16, 128, 2
ROW_KIB = TOKENS * HEAD_SIZE * ITEM // 1024
"""Of one head of a block; more heads make longer runs."""
Paths = dict[str, dict[str, Any]]
"""Settings of the receiver, by path."""
PATHS: Paths = {
    "staged": {},
    "in place": {"own_blocks": True, "in_place_run_bytes": 1},
    "chosen": {"own_blocks": True},
}
PROMPT = b"k" * 32


@dataclass(frozen=True)
class Row:
    """The median of one path at one size, in GB/s (10^9 bytes)."""

    commit: str
    transport: str
    kib: int
    path: str
    gbps: float


@dataclass(frozen=True)
class Shape:
    """One size: how many heads make a run of it, and how many blocks make the bytes."""

    kib: int
    num_bytes: int

    @property
    def num_heads(self) -> int:
        return self.kib // ROW_KIB

    @property
    def num_blocks(self) -> int:
        return self.num_bytes // (self.kib * 1024 * 2 * NUM_LAYERS)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * TOKENS

    def state(self) -> Any:
        from kv_transfer.plan.cache_state import BlockLayout, CacheState, ParallelLayout

        return CacheState(
            fingerprint="bench",
            attention="full",
            dtype="bfloat16",
            head_size=HEAD_SIZE,
            num_planes=2,
            num_layers=NUM_LAYERS,
            num_kv_heads=self.num_heads,
            tokens_per_block=TOKENS,
            layout=BlockLayout("token_major"),
            parallel=ParallelLayout.even(1, [NUM_LAYERS], self.num_heads),
        )


class Pool:
    """The cache of one process: [K or V, block, token, head, element] a layer; `blocks` are those of the request."""

    def __init__(self, shape: Shape, seed: int) -> None:
        import torch

        from kv_transfer.pools import PagedCaches

        self.shape = shape
        sizes = (2, shape.num_blocks, TOKENS, shape.num_heads, HEAD_SIZE)
        self.layers = [torch.zeros(sizes, dtype=torch.bfloat16) for _ in range(NUM_LAYERS)]
        self.blocks = random.Random(seed).sample(range(shape.num_blocks), shape.num_blocks)
        state = shape.state()
        self.caches = PagedCaches.of_layers(state.share_of(0), [layer.unbind(0) for layer in self.layers], TOKENS)

    def plain(self, name: str) -> Plain:
        """NIXL itself over these blocks."""
        planes = [plane.data_ptr() for layer in self.layers for plane in layer]
        return Plain(name, Blocks(planes, self.shape.kib * 1024, self.shape.num_blocks))

    def fill(self) -> None:
        """What the request holds: other bytes in every token of every block."""
        for number, content in enumerate(contents(self.shape)):
            self.layers[number][:, self.blocks] = content

    def clear(self) -> None:
        for layer in self.layers:
            layer.zero_()

    def check(self) -> None:
        for number, content in enumerate(contents(self.shape)):
            assert self.layers[number][:, self.blocks].equal(content), f"layer {number} is not what was sent"


def contents(shape: Shape) -> Any:
    """The content of each layer, in the order of the request's blocks."""
    import torch

    generator = torch.Generator().manual_seed(shape.kib)
    sizes = (2, shape.num_blocks, TOKENS, shape.num_heads, HEAD_SIZE)
    for _ in range(NUM_LAYERS):
        yield torch.randint(0, 200, sizes, generator=generator, dtype=torch.uint8).to(torch.bfloat16)


def serve(pipe: Connection, shape: Shape, transport: str) -> None:
    """The sender: offers its request again and again, until it is told None."""
    allow(transport)
    from kv_transfer.instance import InstanceDoor
    from kv_transfer.orders import BlockTables, Offer

    pool = Pool(shape, seed=1)
    pool.fill()
    plain, config = pool.plain("sender"), config_of({"share_in_place": True})
    transceiver = transceiver_of("sender", config, pool)
    door = InstanceDoor(config, "sender", "sender")  # type: ignore[arg-type]
    door.set_cards([transceiver.card])
    pipe.send((door.address, plain.card(), pool.blocks))
    while True:
        if pipe.poll(0.01):
            if (transfer := pipe.recv()) is None:
                break
            door.open_offer(transfer, transfer, PROMPT)
            tables = BlockTables(shape.num_tokens, (tuple(pool.blocks),))
            transceiver.offer(Offer(transfer, transfer, PROMPT, tables))
            pipe.send("offered")
        for settled in door.poll_settled():
            transceiver.settle(settled.transfer_id, settled.request_id, settled.reason)
        transceiver.poll()
    transceiver.close()
    door.close()


def allow(transport: str) -> None:
    """Before NIXL is loaded: with TCP alone two processes talk as if on two hosts."""
    if transport == "tcp":
        os.environ["UCX_TLS"] = "tcp"


def config_of(changes: dict[str, Any]) -> Any:
    from kv_transfer.config import TransferConfig

    return TransferConfig(request_deadline_s=300.0, lease_s=600.0, **changes)


def transceiver_of(name: str, config: Any, pool: Pool) -> Any:
    from kv_transfer.agent.nixl import nixl_agent
    from kv_transfer.transceiver import Transceiver

    return Transceiver(config, name, name, 0, pool.shape.state(), pool.caches, nixl_agent())  # type: ignore[arg-type]


PLAIN = "a descriptor a block"


class Receiver:
    """This process: its pool, a transceiver for each path, and NIXL itself beside them."""

    def __init__(self, pipe: Connection, shape: Shape, paths: Paths) -> None:
        self.pipe = pipe
        self.pool = Pool(shape, seed=2)
        self.plain = self.pool.plain("receiver")
        self.ours = {
            path: transceiver_of(path.replace(", ", "-").replace(" ", "-"), config_of(changes), self.pool)
            for path, changes in paths.items()
        }
        self.address, card, self.source_blocks = pipe.recv()
        self.plain.meet("sender", *card)

    def take(self, way: str) -> float:
        """Seconds until the pool holds what the sender has."""
        self.pool.clear()
        seconds = self._read() if way == PLAIN else self._receive(way)
        self.pool.check()
        return seconds

    def close(self) -> None:
        for transceiver in self.ours.values():
            transceiver.close()
        self.pipe.send(None)

    def _receive(self, path: str) -> float:
        from kv_core.spans import Span
        from kv_transfer.orders import BlockTables, ReceiveOrder

        transfer = secrets.token_hex(16)
        self.pipe.send(transfer)
        self.pipe.recv()
        num_tokens = self.pool.shape.num_tokens
        tables = BlockTables(num_tokens, (tuple(self.pool.blocks),))
        order = ReceiveOrder(transfer, transfer, PROMPT, Span(0, num_tokens), tables, *self.address)  # type: ignore[arg-type]
        began = time.perf_counter()
        self.ours[path].receive(order)
        while not (received := self.ours[path].poll().received):
            time.sleep(0.0005)
        seconds = time.perf_counter() - began
        assert received[0].ok, received[0].reason
        return seconds

    def _read(self) -> float:
        began = time.perf_counter()
        self.plain.read(self.pool.blocks, self.source_blocks)
        return time.perf_counter() - began


def measure(shape: Shape, transport: str, repeats: int, paths: Paths) -> dict[str, list[float]]:
    """Seconds of each way, by repetition; this process is the receiver."""
    allow(transport)
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    sender = context.Process(target=serve, args=(theirs, shape, transport), daemon=True)
    sender.start()
    receiver = Receiver(pipe, shape, paths)
    seconds: dict[str, list[float]] = {way: [] for way in (*paths, PLAIN)}
    for repetition in range(repeats + 1):
        # Turns change, so that no way always follows the same other one. The first round connects, and is not counted.
        for way in random.Random(repetition).sample(sorted(seconds), len(seconds)):
            seconds[way].append(receiver.take(way))
    receiver.close()
    sender.join(30)
    return {way: found[1:] for way, found in seconds.items()}


def measured(pipe: Connection, shape: Shape, transport: str, repeats: int, paths: Paths) -> None:
    """In a process of its own, since UCX reads its settings once."""
    pipe.send(measure(shape, transport, repeats, paths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 32, 256])
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp"], choices=["shm", "tcp"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="staged in chunks of so many MiB too")
    options = parser.parse_args()
    paths = PATHS | {f"staged, {mib} MiB": {"chunk_bytes": mib << 20} for mib in options.chunks}
    rows, ratios = [], dict[str, dict[str, float]]()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    context = mp.get_context("spawn")
    for transport in options.transports:
        for kib in options.sizes:
            shape = Shape(kib, options.mib << 20)
            pipe, theirs = context.Pipe()
            process = context.Process(target=measured, args=(theirs, shape, transport, options.repeats, paths))
            process.start()
            theirs.close()
            seconds = pipe.recv()
            process.join()
            # Of each repetition by itself: neighbours in time share the noise of the machine.
            plain = seconds[PLAIN]
            for way in paths:
                of_way = [theirs_s / ours_s for ours_s, theirs_s in zip(seconds[way], plain, strict=True)]
                ratios.setdefault(way, {})[f"{transport} {kib} KiB"] = round(median(of_way), 2)
            for way, found in seconds.items():
                gbps = round(shape.num_bytes / median(found) / 1e9, 2)
                rows.append(Row(commit, transport, kib, way, gbps))
                print(f"{transport:4} {kib:4} KiB  {way:21} {gbps:6.2f} GB/s", flush=True)
    keep(rows)
    for claim, way in (("blocks of an engine are staged", "staged"), ("the path that is chosen", "chosen")):
        speeds = {f"{row.transport} {row.kib} KiB": row.gbps for row in rows if row.path == way}
        plain_speeds = {f"{row.transport} {row.kib} KiB": row.gbps for row in rows if row.path == PLAIN}
        line = {"claim": claim, "ours": speeds, "theirs": plain_speeds, "ratio": min(ratios[way].values())}
        print(json.dumps(line | {"ratios": ratios[way], "unit": "GB/s"}))


def keep(rows: list[Row]) -> None:
    """Append to the CSV file."""
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        if is_new:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    main()
