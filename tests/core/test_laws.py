"""`check()` notices what is broken: each law, broken by hand in a manager that does all there is to do."""

from array import array

import pytest

from kv_core.config import ManagerConfig, WindowConfig
from kv_core.ids import RequestId
from kv_core.keys import BlockKey, Scope
from kv_core.manager import KVCacheManager
from kv_core.request import Request
from kv_core.tiers import Tier


class Busy:
    """Two windows and a host tier: a cached chain in both tiers, a cached picture, a running request, a pinned one."""

    def __init__(self):
        windows = (WindowConfig(8, 20), WindowConfig(64, 14, 4))
        self.manager = KVCacheManager(
            ManagerConfig(tokens_per_block=4, windows=windows, max_sequence_length=64, event_buffer_size=100)
        )
        self.serve("cached", range(100, 118))
        self.serve("picture", range(200, 209), Scope(extras=((b"picture", 2),)))
        self.manager.add(Request("pinned", list(range(300, 309))))
        self.pin = self.manager.release("pinned", pin=True)
        self.manager.add(Request("running", list(range(400, 422))))
        self.manager.publish("running", 18, partial=True)
        self.manager.check()

    def serve(self, name, tokens, scope=None):
        self.manager.add(Request(name, list(tokens), scope or Scope()))
        self.manager.release(name)

    @property
    def windows(self):
        return self.manager._registry.windows

    @property
    def sequence(self):
        return self.manager._registry.sequences[RequestId("running")]

    @property
    def table(self):
        return self.sequence.tables[1]

    def free_run(self, tier=Tier.DEVICE):
        """Cached, and nobody holds it."""
        return next(run for run in self.windows[1].tree.runs() if not run.holders and run.ids and run.tier == tier)

    def queue(self, tier=Tier.DEVICE):
        return self.windows[1].queues[tier]


def unknown_parent(busy):
    run = busy.free_run()
    run.parent = busy.table.root if run.parent is not busy.table.root else busy.table.tail


def another_key(busy):
    children = busy.table.root.children
    children[b"else"] = children.pop(next(iter(children)))


def other_tokens(busy):
    """Behind the first token, so that the parent still finds the child under its first block."""
    run = max(busy.windows[1].tree.runs(), key=lambda one: one.count)
    end = run.base + run.count * run.block_bytes
    run.tokens = run.tokens[: end - 4] + bytes(4) + run.tokens[end:]


def other_key_of_content(busy):
    busy.free_run().keys[-1] = BlockKey(bytes(32))


def a_tail_of_other_content(busy):
    partial = busy.table.partial
    log = busy.sequence.log
    log._told = log._told[: partial.start * 16] + bytes(8) + log._told[partial.start * 16 + 8 :]


def a_block_twice(busy):
    run = busy.table.tail
    run.ids = array("i", [run.ids[0]] * len(run.ids))


def one_holder_more(busy):
    busy.table.tail.holders += 1


def one_anchor_more(busy):
    busy.free_run().anchors += 1


def held_below_the_device(busy):
    busy.free_run(Tier.HOST).holders += 1


def another_tier(busy):
    busy.free_run(Tier.HOST).tier = Tier.DISK


def free_and_in_no_queue(busy):
    busy.queue().claim(busy.free_run())


def held_and_free(busy):
    busy.queue().release(busy.table.tail)


def two_ids_for_a_slot(busy):
    pool = busy.windows[1].pool
    pool._slots[0] = pool._slots[1]


def an_orphan_that_nobody_pins(busy):
    busy.windows[1].orphans[busy.table.ids[-1]] = None


def a_token_too_many(busy):
    busy.sequence.num_tokens += 4


def room_that_is_not_there(busy):
    busy.sequence.room += 1


def an_entry_of_another_block(busy):
    busy.table.ids[0], busy.table.ids[1] = busy.table.ids[1], busy.table.ids[0]


def published_beyond_the_path(busy):
    busy.table.published += 1


BROKEN = {
    unknown_parent: "a child knows its parent|a parent is never|kin",
    another_key: "a child begins with the key it is known by",
    other_tokens: "a key is that of content and parent",
    other_key_of_content: "a key is that of content and parent",
    a_tail_of_other_content: "published content is the request's own",
    a_block_twice: "every block is in one place",
    one_holder_more: "holders are tables and pins|who holds a block holds those before it",
    one_anchor_more: "anchors are tables and pins that end here",
    held_below_the_device: "who holds a block holds|holders are tables and pins",
    another_tier: "kin|a run is on one tier",
    free_and_in_no_queue: "free blocks are those that nobody holds",
    held_and_free: "free blocks are those that nobody holds|what is held is in no queue",
    two_ids_for_a_slot: "every slot has one id",
    an_orphan_that_nobody_pins: "every block is in one place",
    a_token_too_many: "room is up to date|a table has the blocks of its tokens",
    room_that_is_not_there: "room is up to date",
    an_entry_of_another_block: "published ids are the path's",
    published_beyond_the_path: "a path ends where publishing ended|every block is in one place",
}


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda function: function.__name__)
def test_a_broken_law_is_named(break_it):
    busy = Busy()
    break_it(busy)
    with pytest.raises(AssertionError, match=BROKEN[break_it]):
        busy.manager.check()


def test_nothing_is_broken_that_is_not_broken_by_hand():
    busy = Busy()
    assert busy.table.partial is not None
    assert busy.free_run(Tier.HOST).ids
    busy.manager.release("running")
    busy.manager.unpin(busy.pin)
    busy.manager.check()
    assert [busy.manager.num_free(64, tier) for tier in Tier] == [14, 4, 0]
