"""An older vLLM: between two engines of it, and across a fleet of which half has been upgraded, answers are right.

The older engines run on all that is installed but vLLM itself. A common run has them in the matrix (`test_matrix.py`).
"""

import httpx
import pytest

from kv_testing.answers import Question, ask, ask_by_hand, largest_move
from kv_testing.handed_over import moved_bytes
from kv_testing.servers import IS_OURS, OLDER, TOKENS_PER_BLOCK, running_fleet
from kv_testing.servers_hooks import KEY, VALUE, corrupt_block

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_OURS, reason="counts our bytes and needs the test hooks of our connector"),
]
ENGINES = ("OP1", "OD1")
PAIRS = pytest.mark.parametrize("pair", [ENGINES, ("OP1", "D1"), ("P1", "OD1")], ids="-".join)
BLOCK = TOKENS_PER_BLOCK
# Tiny model: 4 layers, K and V, 4 heads of 32 elements, float32.
BYTES_PER_TOKEN = 4 * 2 * 4 * 32 * 4
NUM_BLOCKS, NOTICEABLE = 5, 0.01


@pytest.fixture(scope="module")
def fleet(models, tmp_path_factory):
    """Older engines; installed ones start when they are asked for."""
    with running_fleet("shm", models, tmp_path_factory.mktemp("fleet-versions"), ENGINES) as fleet:
        yield fleet


@PAIRS
def test_the_engines_run_what_they_are_meant_to(fleet, pair):
    versions = [httpx.get(f"{fleet.engine(name).url}/version").json()["version"] for name in pair]
    assert [version == OLDER for version in versions] == [name.startswith("O") for name in pair], versions


@PAIRS
@pytest.mark.parametrize("num_tokens", [1, BLOCK, 5 * BLOCK + 7])
def test_every_length_is_answered_right(fleet, run, tally, fresh_prompt, pair, num_tokens):
    assert (
        moved_bytes(fleet, pair, run, tally, Question((fresh_prompt(num_tokens),)))
        == (num_tokens - 1) * BYTES_PER_TOKEN
    )


@PAIRS
def test_only_what_the_decode_engine_lacks_travels(fleet, run, tally, fresh_prompt, pair):
    prompt, known = fresh_prompt(5 * BLOCK + 7), 2 * BLOCK
    run(lambda client: ask(client, fleet.engine(pair[1]).url, Question((prompt[: known + 1],))))
    assert moved_bytes(fleet, pair, run, tally, Question((prompt,))) == (len(prompt) - 1 - known) * BYTES_PER_TOKEN


@PAIRS
@pytest.mark.parametrize("plane", [KEY, VALUE], ids=["key", "value"])
def test_a_spoilt_block_is_heard(fleet, run, fresh_prompt, pair, plane):
    prefill, decode = (fleet.engine(name).url for name in pair)
    moves = {}
    for block in range(NUM_BLOCKS):
        question = Question((fresh_prompt(NUM_BLOCKS * BLOCK - 3),), num_answer_tokens=1)
        with corrupt_block(fleet.hooks(pair[1]), block, plane):
            (answer,) = run(lambda client, asked=question: ask_by_hand(client, prefill, decode, asked))
        (alone,) = run(lambda client, asked=question: ask(client, prefill, asked))
        moves[block] = largest_move(answer, alone)
    assert all(move > NOTICEABLE for move in moves.values()), moves
