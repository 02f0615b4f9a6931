"""Replay of a trace through the cache manager: what each capacity and each eviction order finds again.

In:  a trace (see `kv_core.trace`), capacities of the tiers, eviction orders, retention wishes.
Out: hits against the ceiling of a cache without bounds, and bytes moved between tiers; as text and as CSV.
Law: the manager that decides is the one an engine uses. Requests come in the order of the file, one at a time. A block
     of the trace is one token to the manager; one more token stands for the last one of a prompt, never matched.

    python -m kv_core.replay TRACE --device 2000,8000 --host 0,20000 --order lru,s3-fifo,belady --csv hits.csv
"""

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Final, TextIO

from kv_core.config import ManagerConfig, Order, WindowConfig
from kv_core.errors import CallerError, CapacityError
from kv_core.ids import RequestId
from kv_core.manager import KVCacheManager
from kv_core.request import Request
from kv_core.retention import RangeRetention, RetentionConfig
from kv_core.spans import ceil_div
from kv_core.tiers import Tier
from kv_core.trace import TraceRequest, ceiling_hits, clairvoyant_hits, read_trace

BELADY: Final = "belady"
"""The order that knows the future: the ceiling of its capacity. It has no tiers below the device."""

_LAST_TOKEN: Final = -1

Progress = Callable[[str, int, int], None]
"""Called with what is running, how many requests are done and how many there are."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Blocks of each tier and the eviction order: one of `Order`, or "belady"."""

    order: str
    device: int
    host: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one setting found. Counts are blocks of the trace; `moved` is by (from tier, to tier)."""

    setting: Setting
    num_requests: int
    num_refused: int
    num_blocks: int
    num_hits: int
    num_ceiling: int
    moved: dict[tuple[Tier, Tier], int]
    seconds: float

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_blocks if self.num_blocks else 0.0

    @property
    def ceiling_rate(self) -> float:
        return self.num_ceiling / self.num_blocks if self.num_blocks else 0.0

    def num_moved_into(self, tier: Tier) -> int:
        """Blocks that were copied to this tier, from whichever one."""
        return sum(count for (_, to), count in self.moved.items() if to == tier)


def replay(
    requests: Sequence[TraceRequest],
    settings: Sequence[Setting],
    *,
    retention: RetentionConfig | None = None,
    progress: Progress | None = None,
) -> Iterator[Outcome]:
    """The outcome of each setting, in their order. Ranges of `retention` count blocks of the trace."""
    num_blocks, ceiling = sum(len(one.blocks) for one in requests), ceiling_hits(requests)
    for setting in settings:
        started = perf_counter()
        run = _Run(requests, setting, retention, progress)
        hits = run.foreseen() if setting.order == BELADY else run.decided()
        yield Outcome(
            setting,
            len(requests),
            run.num_refused,
            num_blocks,
            hits,
            ceiling,
            dict(run.moved),
            perf_counter() - started,
        )


class _Run:
    """One setting over one trace."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        setting: Setting,
        retention: RetentionConfig | None,
        progress: Progress | None,
    ) -> None:
        self._requests = requests
        self._setting = setting
        self._retention = retention
        self._progress = progress
        self._now_ms = 0
        self.moved: Counter[tuple[Tier, Tier]] = Counter()
        self.num_refused = 0

    def foreseen(self) -> int:
        room = self._setting.device - 1  # the last token of a prompt takes a block in the other orders too
        self.num_refused = sum(len(one.blocks) > room for one in self._requests)
        self._tell(len(self._requests))
        return clairvoyant_hits(self._requests, room)

    def decided(self) -> int:
        manager = self._manager()
        hits = 0
        for number, one in enumerate(self._requests):
            hits += self._serve(manager, one)
            if number % 256 == 0:
                self._tell(number)
        self._tell(len(self._requests))
        return hits

    def _serve(self, manager: KVCacheManager, one: TraceRequest) -> int:
        """Admit, fill and release one request; its hits."""
        self._now_ms = one.at_ms
        manager.refresh()
        name = RequestId("replayed")
        try:
            admission = manager.add(Request(name, [*one.blocks, _LAST_TOKEN], retention=self._retention))
        except CapacityError:
            admission = None
        if admission is None:
            self.num_refused += 1
            return 0
        manager.release(name)
        self._count(manager)
        return admission.num_cached

    def _count(self, manager: KVCacheManager) -> None:
        orders = manager.take_copies()
        for order in orders:
            self.moved[order.source.tier, order.destination.tier] += 1
        if orders:
            manager.copies_done(orders[-1].order_id + 1)

    def _manager(self) -> KVCacheManager:
        setting, longest = self._setting, max((len(one.blocks) for one in self._requests), default=0) + 1
        config = ManagerConfig(
            tokens_per_block=1,
            windows=(WindowConfig(longest, setting.device, setting.host, setting.disk),),
            max_sequence_length=longest,
            order=Order(setting.order),
        )
        return KVCacheManager(config, clock_ms=lambda: self._now_ms)

    def _tell(self, done: int) -> None:
        if self._progress is not None:
            self._progress(str(self._setting), done, len(self._requests))


# The command.


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for."""

    trace: Path
    settings: tuple[Setting, ...]
    tokens_per_id: int
    tokens_per_block: int
    bytes_per_token: int
    max_requests: int | None
    retention: RetentionConfig | None
    csv: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that this command and `kvferry replay` share."""
    parser.add_argument("trace", type=Path, help="Mooncake-format trace, one JSON object a line")
    parser.add_argument(
        "--device", default="2000,4000,8000,16000", help="blocks of the device tier; several with commas"
    )
    parser.add_argument("--host", default="0", help="blocks of the host tier; several with commas")
    parser.add_argument("--disk", default="0", help="blocks of the disk tier; several with commas")
    orders = ",".join([*(order.value for order in Order), BELADY])
    parser.add_argument("--order", default=orders, help=f"eviction orders, of {orders}")
    parser.add_argument("--tokens-per-id", type=int, default=512, help="tokens that an id of the trace names")
    parser.add_argument("--tokens-per-block", type=int, help="tokens of a block, a divisor of that (default: the same)")
    parser.add_argument("--bytes-per-token", type=int, default=131072, help="bytes of cache a token, all layers")
    parser.add_argument("--requests", type=int, help="replay only the first so many")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="START:STOP:PRIORITY[:MS]",
        help="retention of prompt tokens [START, STOP), STOP may be empty; repeatable",
    )
    parser.add_argument("--csv", type=Path, help="write a CSV file too")


def parse_options(arguments: argparse.Namespace) -> Options:
    """CallerError for what does not fit together."""
    tokens_per_block = arguments.tokens_per_block or arguments.tokens_per_id
    tiers = [_numbers(arguments.device), _numbers(arguments.host), _numbers(arguments.disk)]
    orders = arguments.order.split(",")
    known = [*(order.value for order in Order), BELADY]
    if not set(orders) <= set(known):
        raise CallerError(f"unknown order: ours={known}, theirs={orders}")
    settings = [
        Setting(order, *blocks)
        for blocks in product(*tiers)
        for order in orders
        if order != BELADY or not any(blocks[1:])
    ]
    ranges = tuple(_wish(text, tokens_per_block) for text in arguments.keep)
    return Options(
        arguments.trace,
        tuple(settings),
        arguments.tokens_per_id,
        tokens_per_block,
        arguments.bytes_per_token,
        arguments.requests,
        RetentionConfig(ranges) if ranges else None,
        arguments.csv,
    )


def load(options: Options) -> list[TraceRequest]:
    """The requests that the options select."""
    requests = read_trace(options.trace, options.tokens_per_id, options.tokens_per_block)
    return [one for number, one in enumerate(requests) if options.max_requests is None or number < options.max_requests]


MOVES: Final = ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE), (Tier.HOST, Tier.DISK), (Tier.DISK, Tier.DEVICE))
COLUMNS: Final = (
    "order", "device", "host", "disk", "requests", "refused", "blocks", "hits", "hit_rate", "ceiling_rate",
    *(f"{source.name}_to_{destination.name}_bytes".lower() for source, destination in MOVES), "seconds",
)  # fmt: skip


def row(outcome: Outcome, block_bytes: int) -> tuple[str, ...]:
    """One line of the CSV file, in the order of COLUMNS."""
    setting = outcome.setting
    counts = (outcome.num_requests, outcome.num_refused, outcome.num_blocks, outcome.num_hits)
    moved = (outcome.moved.get(move, 0) * block_bytes for move in MOVES)
    rates = (f"{outcome.hit_rate:.6f}", f"{outcome.ceiling_rate:.6f}")
    blocks = (setting.device, setting.host, setting.disk)
    return setting.order, *map(str, blocks), *map(str, counts), *rates, *map(str, moved), f"{outcome.seconds:.3f}"


def report(outcomes: Sequence[Outcome], options: Options, out: TextIO) -> None:
    """The table for people, and the CSV file if asked for."""
    block_bytes = options.tokens_per_block * options.bytes_per_token
    print(f"{'':8} {'blocks of a tier':>26} {'':17} {'GB moved into a tier':>26}", file=out)
    tiers = f"{'device':>8} {'host':>8} {'disk':>8}"
    print(f"{'order':8} {tiers} {'hits':>8} {'ceiling':>8} {tiers} refused", file=out)
    for one in outcomes:
        setting = one.setting
        blocks = f"{setting.device:8} {setting.host:8} {setting.disk:8}"
        rates = f"{one.hit_rate:8.1%} {one.ceiling_rate:8.1%}"
        moved = " ".join(f"{one.num_moved_into(tier) * block_bytes / 1e9:8.1f}" for tier in Tier)
        print(f"{setting.order:8} {blocks} {rates} {moved} {one.num_refused:7}", file=out)
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(row(one, block_bytes) for one in outcomes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for arguments or a trace that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m kv_core.replay", description="Replay a trace through the cache.")
    add_arguments(parser)
    try:
        options = parse_options(parser.parse_args(arguments))
        report(list(replay(load(options), options.settings, retention=options.retention)), options, sys.stdout)
    except (CallerError, OSError) as error:
        print(f"kv_core.replay: {error}", file=sys.stderr)
        return 2
    return 0


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise CallerError(f"numbers with commas: {text!r}") from error


def _wish(text: str, tokens_per_block: int) -> RangeRetention:
    """Tokens to blocks: a block belongs to the range if one of its tokens does."""
    try:
        start, stop, priority, *duration = text.split(":")
        blocks = int(start) // tokens_per_block, ceil_div(int(stop), tokens_per_block) if stop else None
        return RangeRetention(*blocks, int(priority), int(duration[0]) if duration else None)
    except (ValueError, IndexError) as error:
        raise CallerError(f"START:STOP:PRIORITY[:MS], in tokens: {text!r}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
