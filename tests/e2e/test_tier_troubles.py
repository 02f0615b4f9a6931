"""A real engine with tiers in trouble: few blocks for many requests, clients that go, other weights, disks that fail.

Without its own prefix cache and with one; prompts are computed in steps of 64 tokens. The engine is stepped by hand
(`tier_storm`); every answer is compared with what the same prompt is answered alone.
"""

import os
import random
import shutil
from pathlib import Path

import pytest

from kv_core.keys import Scope
from kv_core.spans import Span
from kv_testing.answers import Answer, Verdict, judge
from kv_testing.tier_process import running_engine
from kv_testing.tier_storm import Asked, alone, answer_to, storm
from kv_testing.tier_troubles import (
    at_rest,
    break_disk,
    errors,
    forget_device,
    forget_host,
    mend_disk,
    reset,
    reset_while_open,
    secret_of,
    turn_weights,
)
from kv_transfer.prefix_store.chain import PrefixChain

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(1200)]

NUM_TOKENS = 717
RECORD = 64
CHUNK = 64
NOISE = 1e-3
"""Of a log-probability: tokens in other batches are added in another order."""
COSTS = {"tier_recompute_token_s": 1.0, "tier_host_byte_s": 0.0, "tier_disk_byte_s": 0.0, "tier_start_s": 0.0}
# Why so long a wait: nothing is to be computed because a busy machine was late.
TIERS = COSTS | {"tier_host_bytes": 1 << 26, "tier_disk_bytes": 1 << 28, "tier_disk_wait_s": 60.0}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "caching"])
def engine(request, models, tmp_path_factory):
    kept = tmp_path_factory.mktemp("troubles") / "kept"
    caches = {"enable_prefix_caching": request.param, "max_num_batched_tokens": CHUNK, "max_num_seqs": 16}
    with running_engine(models["tiny"], TIERS | {"tier_disk_dir": str(kept)}, "recompute", **caches) as engine:
        engine.do(errors)
        yield engine


@pytest.fixture(autouse=True)
def no_error_is_logged(engine):
    yield
    assert engine.do(errors) == []


@pytest.fixture
def directory(engine):
    return Path(engine.settings["tier_disk_dir"])


def prompt(name, num_tokens=NUM_TOKENS):
    dice = random.Random(name)
    return tuple(dice.choice(range(16, 500)) for _ in range(num_tokens))


def ask(engine, tokens, num_tokens=5):
    """The answer, and how many tokens were not computed; the engine's own cache has nothing of it."""
    engine.do(forget_device)
    return engine.do(answer_to, tokens, num_tokens)


def is_right(ours, theirs):
    found = judge(ours, Answer(theirs.tokens[: len(ours.tokens)], theirs.best[: len(ours.tokens)]))
    return found.verdict is not Verdict.WRONG and found.gap < NOISE


def demand(engine, tokens, num_cached, right, num_tokens=5):
    answer, found = ask(engine, tokens, num_tokens)
    assert found == num_cached
    assert is_right(answer, right), (answer, right)


def test_a_hit_may_end_anywhere_in_a_chunk_and_needs_no_prefix_cache(engine):
    kept = prompt("chunks")
    others = [kept[:716] + prompt("more", 50), kept[:500] + prompt("else", 217), kept[:65]]
    rights = engine.do(alone, [kept, *others], 5)
    demand(engine, kept, 0, rights[0])
    again = [NUM_TOKENS - 1, NUM_TOKENS - 1, 500, 64]
    for tokens, num_cached, right in zip([kept, *others], again, rights, strict=True):
        demand(engine, tokens, num_cached, right)


def storm_of(seed, number, families=2):
    """Prompts of which several begin alike and most fit twice, and who asks for them."""
    dice = random.Random(f"storm {seed}")
    roots = [prompt(f"root {seed} {family}", dice.choice((70, 130))) for family in range(families)]
    prompts = [roots[at % families] + prompt(f"storm {seed} {at}", dice.randint(10, 60)) for at in range(4)]
    asked = [Asked(dice.randrange(4), dice.choice((3, 90, 90)), dice.random() < 0.3) for _ in range(number)]
    return prompts, asked


def wrong(said, rights):
    return [each for each in said if not is_right(each.answer, rights[each.asked.prompt])]


def test_answers_are_right_in_a_storm_and_nothing_stays(engine):
    prompts, asked = storm_of(1, 32)
    rights = engine.do(alone, prompts, 90)
    said, seen = engine.do(storm, prompts, asked, 1)
    print(f"\nstorm: {seen}")
    assert not wrong(said, rights)
    assert len(said) + seen["left"] >= len(asked)
    wanted = ("preemptions", "steps in which preempted ones load", "steps while saving", "loads", "saves", "left")
    assert all(seen.get(name) for name in wanted), seen
    # While copies are open the engine waits for their blocks.
    assert not seen.get("preemptions while others are saved"), seen

    # The control: what is loaded is what answers are made of.
    said, seen = engine.do(storm, prompts, asked[:16], 2, True)
    assert wrong(said, rights)
    assert seen["loads"]
    assert engine.do(reset), "what was spoilt may be on disk"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_answers_are_right_in_many_storms(engine, seed):
    seed += 1000 * int(os.environ.get("KVFERRY_SEED", "0")) + 10
    prompts, asked = storm_of(seed, 60, families=3)
    rights = engine.do(alone, prompts, 90)
    said, seen = engine.do(storm, prompts, asked, seed)
    print(f"\nstorm {seed}: {seen}")
    assert not wrong(said, rights)
    assert not seen.get("preemptions while others are saved"), seen


def test_nothing_from_before_a_reset_is_served(engine):
    kept, saved, long = prompt("weights"), prompt("saved", 100), prompt("long", 150)
    before = engine.do(alone, [kept], 5)
    demand(engine, kept, 0, before[0])
    engine.do(forget_device)
    seen = engine.do(reset_while_open, [kept, saved, long])
    assert seen["saving"], seen
    assert seen["loading"], seen
    assert not seen["reset"], "vLLM says that blocks are in use"
    try:
        after = engine.do(alone, [kept, saved, long], 5)
        assert not is_right(before[0], after[0]), "other weights, other answers"
        for tokens, right in zip([kept, saved, long], after, strict=True):
            demand(engine, tokens, 0, right)
        demand(engine, kept, NUM_TOKENS - 1, after[0])
    finally:
        engine.do(turn_weights)

    # The control: without a reset what other weights have computed is served.
    answer, num_cached = ask(engine, kept)
    assert num_cached == NUM_TOKENS - 1
    assert not is_right(answer, before[0])
    assert engine.do(reset)
    demand(engine, kept, 0, before[0])
    demand(engine, kept, NUM_TOKENS - 1, before[0])


def more(engine, before, name):
    """How much more has been counted under this name."""
    return engine.do(at_rest).get(name, 0) - before.get(name, 0)


def test_a_disk_that_fails_is_a_miss_and_is_used_again(engine):
    kept = prompt("disk")
    (right,) = engine.do(alone, [kept], 5)
    before = engine.do(at_rest)

    engine.do(break_disk, "write")
    demand(engine, kept, 0, right)
    assert more(engine, before, "write disk_full") == 1
    demand(engine, kept, NUM_TOKENS - 1, right)  # host memory has it
    engine.do(forget_host)
    demand(engine, kept, 0, right)
    engine.do(mend_disk)
    engine.do(forget_host)
    demand(engine, kept, 0, right)
    engine.do(forget_host)
    demand(engine, kept, NUM_TOKENS - 1, right)

    engine.do(forget_host)
    engine.do(break_disk, "read")
    demand(engine, kept, 0, right)
    assert more(engine, before, "read unreadable")
    engine.do(mend_disk)


@pytest.mark.parametrize(("damage", "name"), [
    ("flip", "read corrupt"), ("truncate", "read truncated"), ("delete", "read absent"),
])  # fmt: skip
def test_a_file_that_is_damaged_while_the_engine_runs_is_a_miss(engine, directory, damage, name):
    kept = prompt(damage)
    (right,) = engine.do(alone, [kept], 5)
    assert engine.do(reset)
    secret = engine.do(secret_of)
    demand(engine, kept, 0, right)
    before = engine.do(at_rest)
    engine.do(forget_host)
    harm(directory, kept, secret, 5, damage)
    demand(engine, kept, 5 * RECORD, right)
    # A file that is not there is not looked for any further.
    assert more(engine, before, name) == (0 if damage == "delete" else 1)
    engine.do(forget_host)
    demand(engine, kept, NUM_TOKENS - 1, right)  # written again


@pytest.mark.parametrize("by", ["nothing", "a file"])
def test_a_directory_that_is_gone_is_a_miss(engine, directory, by):
    kept, away = prompt(by), directory.with_name("away")
    (right,) = engine.do(alone, [kept], 5)
    demand(engine, kept, 0, right)
    engine.do(forget_host)
    before = engine.do(at_rest)
    shutil.move(directory, away)
    if by == "a file":
        directory.touch()
    try:
        demand(engine, kept, 0, right)
        assert more(engine, before, {"nothing": "lookup absent", "a file": "lookup unreadable"}[by])
    finally:
        if by == "a file":
            directory.unlink()
        shutil.rmtree(directory, ignore_errors=True)
        shutil.move(away, directory)
    engine.do(forget_host)
    demand(engine, kept, NUM_TOKENS - 1, right)


def harm(directory, tokens, secret, ordinal, damage):
    """Damage the file of one record, as it is named since the last reset."""
    scope = Scope(salt=f"{secret} {None!r}")
    ((_, key),) = PrefixChain(tokens, scope, RECORD).records(Span(ordinal * RECORD, (ordinal + 1) * RECORD))
    (path,) = directory.rglob(f"{key.hex()}/*")
    content = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
