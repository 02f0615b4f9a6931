"""What the example shows: one configuration of the cache each, and what has to happen in it.

In:  -
Out: SCENARIOS, and `play`, which serves the jobs of one of them and judges the answers.
Law: a scenario whose point did not happen proves nothing, so that is a failure as well.
"""

import errno
import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kv_core.config import ManagerConfig, Order, WindowConfig
from kv_core.keys import Scope
from kv_core.layout import cache_pools
from kv_core.manager import KVCacheManager
from kv_core.request import NO_SCOPE
from kv_core.spec import CacheSpec
from kv_core.stats import ManagerStats
from kv_core.tiers import Tier
from kv_transfer.block_pools import BlockPools
from kv_transfer.copy_engine import CopyEngine
from kv_transfer.file_mover import FileCalls, PlainFiles
from paged_engine.engine import PagedEngine, Totals
from paged_engine.generation import Answer
from paged_engine.judging import Verdict, judge
from paged_engine.llama import Llama
from paged_engine.paged import Slots
from paged_engine.workload import MAX_TOKENS, HistoryDrafter, next_jobs

TOKENS_PER_BLOCK = 4
WIDEST = 128
"""The longest sequence; also the manager's name for the window of full attention."""

Moves = Mapping[tuple[Tier, Tier], int]


class Played(NamedTuple):
    """A scenario's answers and all that was counted on the way."""

    answers: list[Answer]
    verdict: Verdict
    stats: ManagerStats
    totals: Totals
    moves: Moves

    def total(self, name: str) -> int:
        """A counter of `WindowStats`, over all windows."""
        return sum(getattr(window, name) for window in self.stats.windows)

    @property
    def num_partial(self) -> int:
        """Answers for which a part of a block was found."""
        return sum(answer.num_cached % TOKENS_PER_BLOCK > 0 for answer in self.answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`windows` are dealt to the layers in turn; `blocks` has (device, host, disk) for each distinct one, ascending."""

    name: str
    happened: Callable[[Played], bool]
    windows: tuple[int | None, ...] = (None,)
    blocks: tuple[tuple[int, int, int], ...] = ((400, 0, 0),)
    reuse: bool = True
    partial_reuse: bool = True
    copy_on_partial: bool = True
    order: Order = Order.LRU
    beam_width: int = 1
    num_drafts: int = 0
    scopes: tuple[Scope, ...] = (NO_SCOPE,)
    num_waves: int = 3
    jobs_per_wave: int = 8
    num_copy_workers: int = 0
    calls: Callable[[], FileCalls] = FileCalls

    @property
    def config(self) -> ManagerConfig:
        sizes = sorted(WIDEST if window is None else window for window in set(self.windows))
        return ManagerConfig(
            tokens_per_block=TOKENS_PER_BLOCK,
            windows=tuple(WindowConfig(size, *blocks) for size, blocks in zip(sizes, self.blocks, strict=True)),
            max_sequence_length=WIDEST,
            max_beam_width=self.beam_width,
            reuse=self.reuse,
            partial_reuse=self.partial_reuse,
            copy_on_partial=self.copy_on_partial,
            max_rewind=self.num_drafts,
            order=self.order,
        )


@contextmanager
def engine_of(
    scenario: Scenario,
    model: Llama,
    directory: Path,
    *,
    drafter: HistoryDrafter | None = None,
    spoil: Callable[[Slots], Slots] | None = None,
) -> Iterator[tuple[PagedEngine, KVCacheManager]]:
    """An engine with its manager; its memory and files are given back at the end."""
    assert MAX_TOKENS <= WIDEST, "law: every job fits"
    spec = CacheSpec.uniform(
        num_layers=model.shape.num_layers,
        num_heads=model.shape.num_key_heads,
        head_size=model.shape.head_size,
        dtype="float32",
        tokens_per_block=TOKENS_PER_BLOCK,
        windows=scenario.windows,
    )
    config = scenario.config
    pools = BlockPools(
        cache_pools(spec), config.windows, device=model.device, directory=directory, mover=PlainFiles(scenario.calls())
    )
    copies = CopyEngine(pools, num_workers=scenario.num_copy_workers)
    manager = KVCacheManager(config)
    try:
        yield PagedEngine(model, manager, pools, copies, drafter=drafter, spoil=spoil), manager
    finally:
        manager.close()
        copies.close()
        pools.close()


def play(
    scenario: Scenario, model: Llama, directory: Path, seed: int = 0, spoil: Callable[[Slots], Slots] | None = None
) -> Played:
    """Serve the scenario's jobs wave by wave, later ones referring to earlier ones, and judge all answers."""
    dice = random.Random(seed)
    drafter = HistoryDrafter(random.Random(seed), scenario.num_drafts) if scenario.num_drafts else None
    answers: list[Answer] = []
    with engine_of(scenario, model, directory, drafter=drafter, spoil=spoil) as (engine, manager):
        for _ in range(scenario.num_waves):
            jobs = next_jobs(dice, answers, scenario.jobs_per_wave, scenario.scopes, scenario.beam_width)
            answers += engine.run(jobs)
            if drafter:
                drafter.history = answers
            manager.check()
        stats = manager.stats()
        assert all(tiers.tiers[0].num_used == 0 for tiers in stats.windows), "law: all blocks come back"
    return Played(answers, judge(model, answers), stats, engine.totals, engine.moves)


def failing_calls() -> FileCalls:
    """A disk of which every sixth write and every fourth read fails."""
    calls = itertools.count(1)

    def write(file: int, content: memoryview) -> int:
        if next(calls) % 6 == 0:
            raise OSError(errno.ENOSPC, "no space left on this pretended device")
        return os.write(file, content)

    def read_into(file: int, buffer: memoryview) -> int:
        if next(calls) % 4 == 0:
            raise OSError(errno.EIO, "this pretended device fails")
        return os.readv(file, [buffer])

    return FileCalls(write, read_into)


def _went_down(played: Played) -> bool:
    return played.moves[Tier.DEVICE, Tier.HOST] > 0 and played.total("num_onboarded") > 0


def _came_from_disk(played: Played) -> bool:
    return played.moves[Tier.HOST, Tier.DISK] > 0 and played.moves[Tier.DISK, Tier.DEVICE] > 0


def _found(played: Played) -> bool:
    return played.stats.num_cached_tokens > 0


SCOPES = tuple(Scope(lora, salt) for lora in (None, "one", "two") for salt in (None, "tenant"))
ADAPTERS = "one two"

OFF = Scenario(
    name="everything off",
    reuse=False,
    happened=lambda played: not _found(played) and played.total("num_copied") == 0,
)
REUSE = Scenario(
    name="reuse",
    partial_reuse=False,
    happened=lambda played: _found(played) and played.num_partial == 0,
)
PARTIAL = Scenario(
    name="partial reuse",
    copy_on_partial=False,
    jobs_per_wave=12,
    num_waves=4,
    happened=lambda played: played.num_partial > 0 and played.total("num_copied") == 0,
)
COPY = Scenario(
    name="copy on partial",
    happened=lambda played: played.num_partial > 0 and played.moves[Tier.DEVICE, Tier.DEVICE] > 0,
)
PRESSURE = Scenario(
    name="eviction under pressure",
    blocks=((32, 0, 0),),
    happened=lambda played: played.total("num_dropped") > 0 and played.totals.num_preempted > 0,
)
SCAN_RESISTANT = replace(PRESSURE, name="eviction by S3-FIFO", order=Order.S3_FIFO)
HOST = Scenario(name="host tier", blocks=((36, 60, 0),), happened=_went_down)
DISK = Scenario(name="host and disk tier", blocks=((36, 20, 100),), happened=_came_from_disk)
FAILING = replace(
    DISK,
    name="host and disk tier, failing files",
    num_waves=4,
    calls=failing_calls,
    happened=lambda played: played.totals.num_lost > 0 and _came_from_disk(played),
)
DISK_IN_THREADS = replace(DISK, name="host and disk tier, threads", num_copy_workers=2)
SWA = Scenario(name="sliding window", windows=(12,), blocks=((120, 0, 0),), happened=_found)
ALTERNATING = Scenario(
    name="alternating windows", windows=(12, None), blocks=((200, 0, 0), (300, 0, 0)), happened=_found
)
THREE_WINDOWS = Scenario(
    name="three windows", windows=(8, 20, None), blocks=((200, 0, 0), (200, 0, 0), (300, 0, 0)), happened=_found
)
ALTERNATING_IN_TIERS = replace(
    ALTERNATING,
    name="alternating windows in three tiers",
    blocks=((48, 30, 60), (48, 30, 60)),
    happened=lambda played: _went_down(played) and _came_from_disk(played),
)
BEAMS = Scenario(
    name="4 beams",
    beam_width=4,
    jobs_per_wave=5,
    num_waves=4,
    happened=lambda played: _found(played) and played.num_partial > 0,
)
REWIND = Scenario(
    name="rewind of rejected drafts",
    num_drafts=3,
    happened=lambda played: played.totals.num_rewound > 0,
)
REWIND_SWA = replace(REWIND, name="rewind, alternating windows", windows=(12, None), blocks=((200, 0, 0), (300, 0, 0)))
ISOLATION = Scenario(
    name="LoRA and salt isolation",
    scopes=SCOPES,
    num_waves=4,
    jobs_per_wave=16,
    happened=lambda played: (
        _found(played) and len({answer.job.scope for answer in played.answers if answer.num_cached}) > 2
    ),
)
ALL = Scenario(
    name="everything at once",
    windows=(12, None),
    blocks=((48, 30, 60), (48, 30, 60)),
    num_drafts=2,
    scopes=SCOPES[:3],
    num_waves=4,
    num_copy_workers=2,
    happened=lambda played: (
        _found(played) and _came_from_disk(played) and played.totals.num_rewound > 0 and played.num_partial > 0
    ),
)

SCENARIOS = (
    OFF,
    REUSE,
    PARTIAL,
    COPY,
    PRESSURE,
    SCAN_RESISTANT,
    HOST,
    DISK,
    DISK_IN_THREADS,
    FAILING,
    SWA,
    ALTERNATING,
    THREE_WINDOWS,
    ALTERNATING_IN_TIERS,
    BEAMS,
    REWIND,
    REWIND_SWA,
    ISOLATION,
    ALL,
)
