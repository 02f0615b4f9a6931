"""Processes that use one store of prefixes at once: what each of them does.

In:  a directory, a seed; an event to tell others by.
Out: what was read right and wrong, by way of a queue.
Law: each prompt has elements of its own, so what belongs to another prompt is noticed.
"""

import os
import threading
from pathlib import Path
from random import Random
from typing import Any

import torch

from kv_core.spans import Span
from kv_testing.stores import config_of, cut, full_world, prompt, write_all
from kv_testing.tagged import World, make_world, words_of
from kv_transfer.file_mover import FileCalls, PlainFiles
from kv_transfer.prefix_store.store import PrefixStore

NUM_TOKENS = 48
RECORD_BYTES = 256 + 3 * 2 * 16 * 4 * 4 * 4
NUM_PROMPTS = 6


def world_of(state, name: int) -> World:
    """An instance that has computed the prompt of this number."""
    world = full_world(state, NUM_TOKENS)
    for caches in world.caches.values():
        for plane in caches.planes:
            words_of(plane).add_(name)
    return world


def play(
    parent: Path, seed: int, tp: int, tokens_per_block: int, num_rounds: int, quota_bytes: int, results: Any
) -> None:
    """Write and read prompts in turn; tells (tokens read, elements wrong, counts)."""
    dice, state = Random(seed), cut(tp, tokens_per_block=tokens_per_block)
    store = PrefixStore(config_of(parent, quota_bytes=quota_bytes, lock_timeout_s=30.0), state)
    num_read, num_wrong = 0, 0
    worlds = [world_of(state, name) for name in range(NUM_PROMPTS)]
    for _ in range(num_rounds):
        name = dice.randrange(NUM_PROMPTS)
        chain = store.chain(prompt(NUM_TOKENS, 1000 * name))
        if dice.randrange(2):
            write_all(store, chain, worlds[name], Span(0, NUM_TOKENS), priority=dice.choice((35, 40)))
            continue
        store.lookup(chain)
        target = make_world(state, NUM_TOKENS, "CBTHD", 1)
        for rank, caches in target.caches.items():
            found = store.read(chain, Span(0, NUM_TOKENS), caches, target.tables(rank).by_group)
            num_read += found
            num_wrong += _num_wrong(worlds[name], target, rank, found)
    store.close()
    results.put((num_read, num_wrong, dict(store.counts)))


def _num_wrong(source: World, target: World, rank, num_tokens: int) -> int:
    """Both have the same block table."""
    count = 0
    for right, ours in zip(source.caches[rank].planes, target.caches[rank].planes, strict=True):
        size = right.shape[1]
        for token in range(num_tokens):
            at = (target.table[token // size], token % size)
            count += int((words_of(right)[at] != words_of(ours)[at]).sum())
    return count


def stop_halfway(parent: Path, is_halfway: Any) -> None:
    """Write half of the second record's payload, tell so, and never go on."""
    calls = []

    def write(file: int, buffer: memoryview) -> int:
        calls.append(len(buffer))
        if len(calls) < 4:
            return os.write(file, buffer)
        os.write(file, buffer[: len(buffer) // 2])
        is_halfway.set()
        threading.Event().wait()
        raise AssertionError("killed before")

    state = cut()
    torch.set_num_threads(1)
    store = PrefixStore(config_of(parent), state, mover=PlainFiles(FileCalls(write=write)))
    write_all(store, store.chain(prompt(NUM_TOKENS)), world_of(state, 0), Span(0, NUM_TOKENS))
