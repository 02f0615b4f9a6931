"""Manager, pools and copy engine together: whatever the manager calls cached holds what was computed for these tokens.

The model is a stand-in: the cache of a token is a number made of its scope and of all tokens up to it. Few tokens and
small pools make prompts share, differ inside of blocks, push each other out, and come back from lower tiers.
"""

from random import Random
from zlib import crc32

import pytest
import torch

from kv_core.config import ManagerConfig, WindowConfig
from kv_core.ids import RequestId
from kv_core.keys import Scope
from kv_core.layout import cache_pools
from kv_core.manager import KVCacheManager
from kv_core.request import Request
from kv_core.spec import CacheSpec
from kv_core.tiers import Tier
from kv_transfer.block_pools import BlockPools
from kv_transfer.copy_engine import CopyEngine
from kv_transfer.slot_copier import SlotCopier

SIZE, WIDEST, SLIDING = 4, 48, 10
SCOPES = [Scope(), Scope("one"), Scope(None, "one")]
WINDOWS = {
    "full": (WindowConfig(WIDEST, 24, 10, 20),),
    "sliding": (WindowConfig(SLIDING, 24, 10, 20),),
    "both": (WindowConfig(SLIDING, 24, 8, 12), WindowConfig(WIDEST, 24, 10, 20)),
}


class StandIn:
    """An engine whose cache is computed without a model."""

    def __init__(self, windows, directory, seed, num_workers=0):
        spec = CacheSpec.uniform(
            num_layers=len(windows),
            num_heads=1,
            head_size=1,
            num_planes=1,
            dtype="float64",
            tokens_per_block=SIZE,
            windows=[None if window.window == WIDEST else window.window for window in windows],
        )
        self.random = Random(seed)
        self.pools = BlockPools(cache_pools(spec), windows, device=torch.device("cpu"), directory=directory)
        self.copies = CopyEngine(self.pools, num_workers=num_workers)
        self.manager = KVCacheManager(
            ManagerConfig(tokens_per_block=SIZE, windows=windows, max_sequence_length=WIDEST, max_rewind=3)
        )
        self.planes = {
            self.pools.window_of(layer): self.pools.planes(layer)[0][:, :, 0, 0] for layer in range(len(windows))
        }
        self.running = {}
        self.history = []
        self.num_cached = 0
        self.moves = set()

    def steps(self, count):
        for _ in range(count):
            self.step()
            self.manager.check()

    def step(self):
        """Requests grow, some take tokens back, new ones start; copies; what is cached is read, the rest is written."""
        drafts = {name: self.grow(name) for name in list(self.running)}
        if len(self.running) < 5:
            self.admit()
        orders = self.manager.take_copies()
        self.moves |= {(order.source.tier, order.destination.tier) for order in orders}
        self.copies.submit(orders)
        progress = self.copies.wait(30)
        assert progress.misses == ()
        self.manager.copies_done(progress.below)
        for name, (scope, tokens, num_filled) in self.running.items():
            self.read(name, scope, tokens, num_filled)
            self.write(name, scope, tokens, num_filled)
            self.running[name] = scope, tokens, len(tokens)
            self.rewind(name, self.random.randint(0, drafts.get(name, 0)))
            self.manager.publish(name, len(self.running[name][1]), partial=self.random.random() < 0.2)
        for name in [name for name in self.running if self.random.random() < 0.15]:
            self.release(name)

    def admit(self):
        name, scope = RequestId(f"{len(self.history)}"), self.random.choice(SCOPES)
        tokens = self.prompt()
        admission = self.manager.add(Request(name, tuple(tokens), scope))
        if admission is not None:
            self.history.append(tokens)
            self.num_cached += admission.num_cached
            self.running[name] = scope, tokens, admission.num_cached

    def prompt(self):
        start = self.random.choice(self.history) if self.history and self.random.random() < 0.7 else []
        kept = start[: self.random.randint(0, len(start))]
        return (kept + [self.random.randrange(3) for _ in range(self.random.randint(1, 14))])[: WIDEST - 8]

    def grow(self, name):
        scope, tokens, num_filled = self.running[name]
        count = self.random.randint(1, 3)
        if len(tokens) + count > WIDEST or not self.manager.grow(name, count):
            self.release(name)
            return 0
        more = [self.random.randrange(3) for _ in range(count)]
        self.manager.extend(name, more)
        self.running[name] = scope, tokens + more, num_filled
        return count

    def rewind(self, name, count):
        scope, tokens, _ = self.running[name]
        if count and self.manager.rewind(name, count):
            self.running[name] = scope, tokens[:-count], len(tokens) - count

    def release(self, name):
        _, tokens, num_filled = self.running.pop(name)
        self.history.append(tokens)
        self.manager.release(name, num_filled=num_filled, publish=self.random.random() < 0.9)

    def read(self, name, scope, tokens, num_filled):
        """All that the tokens behind the filled ones attend to holds what it should."""
        for window, plane in self.planes.items():
            table = self.manager.slots(name, window)
            first = max(0, num_filled + 1 - window)
            for position in range(first, num_filled):
                slot = table[position // SIZE]
                assert slot is not None, f"law: what is read is held: window={window}, position={position}"
                assert plane[slot, position % SIZE] == tag(scope, tokens[: position + 1]), (window, position)

    def write(self, name, scope, tokens, num_filled):
        for window, plane in self.planes.items():
            table = self.manager.slots(name, window)
            for position in range(num_filled, len(tokens)):
                plane[table[position // SIZE], position % SIZE] = tag(scope, tokens[: position + 1])

    def close(self):
        self.copies.close()
        self.pools.close()


def tag(scope, tokens):
    return float(crc32(repr((scope, tokens)).encode()))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_cached_is_what_was_computed(tmp_path, windows, seed, num_workers):
    engine = StandIn(windows, tmp_path, seed, num_workers)
    engine.steps(150)
    assert engine.num_cached > 100
    assert {(Tier.DEVICE, Tier.DEVICE), (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DISK)} <= engine.moves
    assert (Tier.DISK, Tier.DEVICE) in engine.moves
    engine.close()


@pytest.mark.parametrize("tiers", [{Tier.DEVICE}, {Tier.DEVICE, Tier.HOST}, {Tier.HOST, Tier.DISK}], ids=str)
def test_copies_that_are_left_out_are_noticed(tmp_path, tiers, monkeypatch):
    copy = SlotCopier.copy

    def some(copier, order):
        if {order.source.tier, order.destination.tier} != tiers:
            copy(copier, order)

    monkeypatch.setattr(SlotCopier, "copy", some)
    engine = StandIn(WINDOWS["full"], tmp_path, 0)
    with pytest.raises(AssertionError):
        engine.steps(150)
    engine.close()
