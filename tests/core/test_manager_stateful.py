"""The real manager against the naive one: every operation, several worlds, both compared after every step.

`check()` of both runs after each step too. Hypothesis draws the operations and shrinks what it finds; a random player,
which costs less a step, goes on from there, and for millions of steps in the long version.
"""

import os
import random
import threading

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kv_core.config import ManagerConfig, WindowConfig
from kv_core.events import Removed, Stored
from kv_core.manager import KVCacheManager
from kv_core.request import Request
from kv_testing.duel import Duel
from kv_testing.duel_worlds import RETENTIONS, SCOPES, WORLDS
from kv_testing.player import Player

NUMBERS = st.integers(0, 15)
TOKENS = st.sampled_from((1, 1, 2, 3, -1))
PROMPTS = st.one_of(
    st.builds(lambda length, tail: [1] * length + tail, st.integers(0, 28), st.lists(TOKENS, min_size=1, max_size=6)),
    st.lists(TOKENS, min_size=1, max_size=30),
)


class Duels(RuleBasedStateMachine):
    """Draws a world, then operations in it."""

    def __init__(self):
        super().__init__()
        self.duel = None

    @initialize(world=st.sampled_from(WORLDS))
    def begin(self, world):
        self.duel = Duel(world)

    @rule(prompt=PROMPTS)
    def add(self, prompt):
        self.duel.add(prompt)

    @rule(
        prompt=PROMPTS,
        beams=st.integers(1, 3),
        scope=st.none() | st.sampled_from(SCOPES),
        retention=st.none() | st.sampled_from(RETENTIONS),
        extra_ids=st.none() | st.lists(st.sampled_from((0, 7)), min_size=40, max_size=40),
        dummy=st.booleans(),
        known=st.booleans(),
    )
    def add_in_some_manner(self, prompt, beams, scope, retention, extra_ids, dummy, known):
        self.duel.add(
            prompt, beams=beams, scope=scope, retention=retention, extra_ids=extra_ids, dummy=dummy, known=known
        )

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=4))
    def add_all(self, prompts):
        self.duel.add_all(prompts)

    @rule(number=NUMBERS, tokens=st.lists(TOKENS, min_size=1, max_size=6))
    def decode(self, number, tokens):
        self.duel.decode(number, tokens)

    @rule(number=NUMBERS, amount=st.integers(1, 9))
    def grow(self, number, amount):
        self.duel.grow(number, amount)

    @rule(number=NUMBERS, tokens=st.lists(TOKENS, max_size=4))
    def extend(self, number, tokens):
        self.duel.extend(number, tokens)

    @rule(number=NUMBERS, amount=st.integers(1, 9))
    def rewind(self, number, amount):
        self.duel.rewind(number, amount)

    @rule(number=NUMBERS, filled=st.none() | st.integers(0, 40), partial=st.booleans())
    def publish(self, number, filled, partial):
        self.duel.publish(number, filled, partial=partial)

    @rule(number=NUMBERS, filled=st.none() | st.integers(0, 40), publish=st.booleans(), pin=st.booleans())
    def release(self, number, filled, publish, pin):
        self.duel.release(number, publish=publish, num_filled=filled, pin=pin)

    @rule(number=NUMBERS)
    def release_plainly(self, number):
        self.duel.release(number)

    @rule(number=NUMBERS)
    def pin(self, number):
        self.duel.pin(number)

    @rule(number=NUMBERS)
    def unpin(self, number):
        self.duel.unpin(number)

    @rule(number=NUMBERS, positions=st.sets(st.integers(0, 9)))
    def unpin_some(self, number, positions):
        self.duel.unpin_some(number, positions)

    @rule(number=NUMBERS, ordinal=st.integers(0, 8))
    def make_writable(self, number, ordinal):
        self.duel.make_writable(number, ordinal)

    @rule(milliseconds=st.sampled_from((1, 5, 20)))
    def wait(self, milliseconds):
        self.duel.wait(milliseconds)

    @rule(block_id=st.integers(0, 23), priority=st.sampled_from((5, 35, 80)))
    def set_priority(self, block_id, priority):
        self.duel.set_priority(block_id, priority)

    @rule(block_id=st.integers(0, 23), up=st.booleans())
    def move(self, block_id, up):
        self.duel.move(block_id, up=up)

    @rule(numbers=st.lists(st.integers(0, 95), max_size=3))
    def lose(self, numbers):
        self.duel.lose(numbers)

    @rule(
        prompt=PROMPTS,
        scope=st.none() | st.sampled_from(SCOPES),
        extra_ids=st.none() | st.lists(st.sampled_from((0, 7)), min_size=40, max_size=40),
    )
    def ask(self, prompt, scope, extra_ids):
        self.duel.ask(prompt, scope=scope, extra_ids=extra_ids)

    @rule(numbers=st.lists(NUMBERS, max_size=4))
    def dry_run(self, numbers):
        self.duel.dry_run(numbers)

    @invariant()
    def both_show_the_same(self):
        if self.duel is not None:
            self.duel.compare()

    def teardown(self):
        if self.duel is not None:
            self.duel.finish()


def run_hypothesis(num_examples, num_steps):
    run_state_machine_as_test(
        Duels,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )


def test_drawn_operations():
    run_hypothesis(120, 50)


@pytest.mark.parametrize("world", range(len(WORLDS)))
def test_random_operations(world):
    """51,200 steps over all worlds."""
    for seed in range(32):
        play(world, seed, 100)


def play(world, seed, num_steps):
    duel = Duel(WORLDS[world])
    Player(duel, random.Random(f"{world} {seed}")).play(num_steps)
    duel.finish()


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("world", range(len(WORLDS)))
def test_random_operations_for_long(world):
    """Two million steps over all worlds, from a seed that the environment may give (see tools/run_long.py)."""
    first = int(os.environ.get("KVFERRY_SEED", "0")) * 1_000_000
    for seed in range(first, first + 250):
        play(world, seed + 1000, 500)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_drawn_operations_for_long():
    run_hypothesis(2_000, 100)


def test_an_event_reader_in_another_thread_misses_nothing():
    """The engine's thread changes and flushes while a reader takes: what it replays is the tree."""
    manager = KVCacheManager(
        ManagerConfig(
            tokens_per_block=4, windows=(WindowConfig(64, 24, 8),), max_sequence_length=64, event_buffer_size=1 << 20
        )
    )
    known: set[bytes] = set()
    ids: list[int] = []
    failures: list[BaseException] = []

    def read():
        try:
            while True:
                events = manager.take_events(timeout_s=None)
                if not events:
                    return
                for event in events:
                    ids.append(event.event_id)
                    if isinstance(event.payload, Stored):
                        known.update(block.key for block in event.payload.blocks)
                    elif isinstance(event.payload, Removed):
                        known.difference_update(event.payload.keys)
        except BaseException as failure:
            failures.append(failure)

    reader = threading.Thread(target=read)
    reader.start()
    source = random.Random(5)
    for step in range(1_500):
        name = f"r{step}"
        if (
            manager.add(Request(name, [source.choice((1, 1, 1, 2)) for _ in range(source.randrange(1, 40))]))
            is not None
        ):
            manager.release(name)
        manager.flush_events()
    manager.close()
    reader.join(timeout=30)
    assert not reader.is_alive()
    assert not failures
    assert ids == list(range(len(ids)))
    assert known == {block.key for event in manager.snapshot() for block in event.payload.blocks}
