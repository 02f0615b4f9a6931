"""Stores of prefixes and the caches they serve: whole instances that write and read, rank by rank.

In:  worlds of `tagged`, whose every element tells where it belongs.
Out: what a store kept of a world, or gave it.
Law: elements are judged by `tagged`, never by the code under test.
"""

from pathlib import Path

import torch

from kv_core.spans import Span
from kv_testing.layouts import make_state
from kv_testing.tagged import World, expected_planes, fill, make_world
from kv_transfer.plan.cache_state import BlockLayout, CacheState, ParallelLayout
from kv_transfer.prefix_store.chain import PrefixChain
from kv_transfer.prefix_store.config import StoreConfig
from kv_transfer.prefix_store.misses import Miss
from kv_transfer.prefix_store.store import Outcome, PrefixStore

QUOTA = 1 << 24
LAYERS = 3
HEADS = 4


def config_of(parent: Path, **changes) -> StoreConfig:
    """A store of 16 MiB below the test's directory."""
    return StoreConfig(**({"directory": parent / "store", "quota_bytes": QUOTA} | changes))


def cut(tp=1, stages=(LAYERS,), tokens_per_block=16, order="token_major", **changes):
    """A small model, cut for an engine of this shape."""
    heads = changes.get("num_kv_heads", HEADS)
    shape = {"num_layers": sum(stages), "num_kv_heads": heads, "head_size": 4, "dtype": "float32"}
    return make_state(
        **(
            shape
            | {"parallel": ParallelLayout.even(tp, list(stages), heads), "tokens_per_block": tokens_per_block}
            | {"layout": BlockLayout(order)}
            | changes
        )
    )


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


def full_world(state: CacheState, num_tokens: int, form: str = "CBTHD", seed: int = 1) -> World:
    """An instance that has computed all tokens."""
    world = make_world(state, num_tokens, form, seed)
    fill(world, Span(0, num_tokens))
    return world


def write_all(store: PrefixStore, chain: PrefixChain, world: World, tokens: Span, **wish) -> list[Outcome]:
    """Each rank writes what it holds."""
    return [
        store.write(chain, tokens, caches, world.tables(rank).by_group, **wish) for rank, caches in world.caches.items()
    ]


def read_all(store: PrefixStore, chain: PrefixChain, world: World, tokens: Span) -> set[int]:
    """Each rank reads what it needs; how many tokens they read."""
    return {store.read(chain, tokens, caches, world.tables(rank).by_group) for rank, caches in world.caches.items()}


def num_wrong(world: World, tokens: Span) -> int:
    """Elements that differ from: tags for these tokens in all layers, filler everywhere else."""
    return sum(
        int((torch.stack(planes) != tagged).sum())
        for rank in world.caches
        for planes, tagged in expected_planes(world, rank, tokens, is_windowed=False)
    )


def misses(store: PrefixStore, what: str) -> dict[str, int]:
    """Reasons why something was not done, and how often."""
    found = {why: store.counts.get(f"{what} {why}", 0) for why in Miss}
    return {str(why): number for why, number in found.items() if number}


def record_files(directory: Path) -> list[Path]:
    """The files of all records, in order."""
    return sorted(path for path in directory.glob("v*/??/*/*") if path.is_file())
