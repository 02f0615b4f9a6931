"""A prompt prefilled by one engine is answered by another of another shape as a single engine answers it."""

import re

import pytest

from kv_testing.answers import Question, ask
from kv_testing.handed_over import moved_bytes
from kv_testing.servers import TOKENS_PER_BLOCK

ENGINES = ("P1", "D1")
pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(900)]

PAIRS = [("P1", "D1"), ("P2", "D1"), ("P1", "D2")]
BLOCK = TOKENS_PER_BLOCK
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7]
# Tiny model: 4 layers, K and V, 4 heads of 32 elements, float32.
BYTES_PER_TOKEN = 4 * 2 * 4 * 32 * 4


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_every_length_is_answered_right(fleet, run, tally, fresh_prompt, pair, num_tokens):
    question = Question((fresh_prompt(num_tokens),))
    moved = moved_bytes(fleet, pair, run, tally, question, "P1")
    # The last prompt token is always computed where the answer is, since its logits are wanted.
    assert moved == (num_tokens - 1) * BYTES_PER_TOKEN


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_only_what_the_decode_engine_lacks_travels(fleet, run, tally, fresh_prompt, pair):
    prompt = fresh_prompt(5 * BLOCK + 7)
    known = 2 * BLOCK
    run(lambda client: ask(client, fleet.engine(pair[1]).url, Question((prompt[: known + 1],))))
    moved = moved_bytes(fleet, pair, run, tally, Question((prompt,)), "P1")
    assert moved == (len(prompt) - 1 - known) * BYTES_PER_TOKEN


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_three_samples_of_one_prompt(fleet, run, tally, fresh_prompt, pair):
    prompt = fresh_prompt(2 * BLOCK + 5)
    moved = moved_bytes(fleet, pair, run, tally, Question((prompt,), num_children=3), "P1")
    # One load serves all three: the others find its full blocks, and fetch or compute the rest.
    assert (len(prompt) - 1) * BYTES_PER_TOKEN <= moved < 2 * len(prompt) * BYTES_PER_TOKEN


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_several_prompts_in_one_call(fleet, run, tally, fresh_prompt, pair):
    prompts = tuple(fresh_prompt(num_tokens) for num_tokens in (70, 1, 3 * BLOCK, 45))
    moved = moved_bytes(fleet, pair, run, tally, Question(prompts), "P1")
    assert moved == sum(len(prompt) - 1 for prompt in prompts) * BYTES_PER_TOKEN


def test_the_bytes_take_the_transport_that_was_named(fleet, run, tally, fresh_prompt):
    moved_bytes(fleet, ("P1", "D1"), run, tally, Question((fresh_prompt(BLOCK),)), "P1")
    log = fleet.engine("D1").program.log.read_text()
    # UCX names what two workers of one host talk through: "intra-node cfg#1 ... am(tcp/lo cma/memory) ..."
    ways = set(re.findall(r"(\w+)/(?:memory|lo|eth\d+)", " ".join(re.findall(r"intra-node cfg#.*", log))))
    assert ways, "UCX did not log what it uses"
    assert (ways == {"tcp"}) is (fleet.transport == "tcp"), ways


def test_the_same_prompt_again_moves_nothing_new(fleet, run, tally, fresh_prompt):
    question = Question((fresh_prompt(3 * BLOCK + 1),))
    moved_bytes(fleet, ("P1", "D1"), run, tally, question, "P1")
    assert moved_bytes(fleet, ("P1", "D1"), run, tally, question, "P1") == 0
