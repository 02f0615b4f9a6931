"""Negative control: one spoilt block, wherever it is, changes the answer; so right answers mean right blocks."""

import pytest

from kv_testing.answers import Question, ask, ask_by_hand, largest_move
from kv_testing.servers import IS_OURS, TOKENS_PER_BLOCK
from kv_testing.servers_hooks import KEY, VALUE, corrupt_block

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_OURS, reason="needs the test hooks of our connector"),
]

NUM_BLOCKS = 5
NOTICEABLE = 0.01


@pytest.mark.parametrize("pair", [("P1", "D1"), ("P2", "D1"), ("P1", "D2")], ids="-".join)
@pytest.mark.parametrize("plane", [KEY, VALUE], ids=["key", "value"])
def test_a_spoilt_block_is_heard(fleet, run, fresh_prompt, pair, plane):
    prefill, decode = (fleet.engine(name).url for name in pair)
    moves = {}
    for block in range(NUM_BLOCKS):
        question = Question((fresh_prompt(NUM_BLOCKS * TOKENS_PER_BLOCK - 3),), num_answer_tokens=1)
        with corrupt_block(fleet.hooks(pair[1]), block, plane):
            (answer,) = run(lambda client, asked=question: ask_by_hand(client, prefill, decode, asked))
        (alone,) = run(lambda client, asked=question: ask(client, fleet.engine("P1").url, asked))
        moves[block] = largest_move(answer, alone)
    assert all(move > NOTICEABLE for move in moves.values()), moves
