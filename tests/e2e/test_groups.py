"""Models of other cache groups than one of full attention are handed over, and answered as a single engine answers.

The hybrid model has the shape of Gemma 3: four layers slide over 80 tokens, two see all, and vLLM keeps them in three
groups of two layers that share one memory. The latent one has the shape of DeepSeek V2.
"""

import pytest
from model.make_tiny import SHAPES

from kv_testing.answers import (
    PREFILL_PARAMS,
    Question,
    ask,
    ask_by_hand,
    ask_with,
    complete,
    largest_move,
    prefill_only,
)
from kv_testing.handed_over import moved_bytes
from kv_testing.servers import DEADLINE_S, IS_OURS, TOKENS_PER_BLOCK, running_fleet, wait_until
from kv_testing.servers_hooks import KEY, VALUE, bytes_received, corrupt_block, open_things

ENGINES = ("HP1", "HD1", "LP1", "LD1")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_OURS, reason="counts our bytes and needs the test hooks of our connector"),
]
HYBRID, LATENT, WINDOWS, CHUNKS = (SHAPES[kind] for kind in ("hybrid", "latent", "windows", "chunks"))
BLOCK, WINDOW = TOKENS_PER_BLOCK, HYBRID.window
SLIDING, FULL = 0, 2
"""A layer of the hybrid model that slides, and one that sees all."""
OTHER_PAIRS = [
    *[("HP2", "HD1"), ("HP1", "HD2"), ("LP2", "LD1"), ("LP1", "LD2")],
    *[("WP1", "WD1"), ("CP1", "CD1"), ("MP1", "MD1"), ("NP1", "ND1")],
]
PAIRS = [("HP1", "HD1"), ("LP1", "LD1"), *(pytest.param(pair, marks=pytest.mark.long) for pair in OTHER_PAIRS)]
LENGTHS = [1, WINDOW - 1, WINDOW + 2 * BLOCK - 1, 6 * BLOCK + 9]
"""Short of the window; where the first token that is seen ends a block (which vLLM frees at the end); well beyond."""
NOTICEABLE = 0.01


@pytest.fixture(scope="module")
def fleet(request, models, tmp_path_factory):
    """Engines of these models alone; those of a pair are started for its tests."""
    ours = [item for item in request.session.items if item.module is request.module]
    names = ENGINES if any(item.get_closest_marker("long") is None for item in ours) else ()
    with running_fleet("shm", models, tmp_path_factory.mktemp("fleet-groups"), names) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def few_engines(request, fleet):
    """The engines of the long pairs run one pair at a time."""
    pair = request.node.callspec.params.get("pair", ()) if hasattr(request.node, "callspec") else ()
    for name in set(fleet.engines) - {*ENGINES, *pair}:
        fleet.lose(name)
    fleet.start([name for name in pair if name not in fleet.engines])


def num_bytes(pair, num_tokens, num_known=0):
    """What must travel: all tokens but the last; of layers with windows whole blocks of what the last one sees."""
    kind, num_ranks, last = pair[1][0], int(pair[1][-1]), num_tokens - 1
    if kind == "L":
        # Every rank keeps the rows of all heads.
        return last * LATENT.num_layers * (LATENT.rank + LATENT.rope_size) * 4 * num_ranks
    if kind == "C":
        llama, first, is_windowed = CHUNKS.llama, last // CHUNKS.chunk * CHUNKS.chunk, CHUNKS.is_local
        return _bytes_from(llama, [first if each else num_known for each in is_windowed], last)
    shape = WINDOWS if kind == "W" else HYBRID
    first = 0 if kind == "N" else max(0, num_tokens - shape.window) // BLOCK * BLOCK
    is_windowed = [layer == "sliding_attention" for layer in shape.layer_types]
    return _bytes_from(shape, [max(num_known, first) if each else num_known for each in is_windowed], last)


def _bytes_from(shape, starts, stop):
    """Of the tokens from each layer's start on."""
    return sum(stop - start for start in starts) * 2 * shape.num_kv_heads * shape.head_size * 4


@pytest.mark.parametrize("pair", PAIRS, ids="-".join, scope="module")
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_every_length_is_answered_right(fleet, run, tally, fresh_prompt, pair, num_tokens):
    moved = moved_bytes(fleet, pair, run, tally, Question((fresh_prompt(num_tokens),)))
    assert moved == num_bytes(pair, num_tokens)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "H" in str(pair)], ids="-".join, scope="module")
@pytest.mark.parametrize("known", [BLOCK, 4 * BLOCK])
def test_only_what_the_decode_engine_lacks_travels(fleet, run, tally, fresh_prompt, pair, known):
    prompt = fresh_prompt(6 * BLOCK + 9)
    run(lambda client: ask(client, fleet.engine(pair[1]).url, Question((prompt[: known + 1],))))
    assert moved_bytes(fleet, pair, run, tally, Question((prompt,))) == num_bytes(pair, len(prompt), known)


@pytest.mark.parametrize("num_tokens", [6 * BLOCK + 9, WINDOW + 3 * BLOCK - 1])
def test_what_was_received_serves_as_a_prefix(fleet, run, tally, fresh_prompt, num_tokens):
    """The first block of a window is received whole, though the prompt it came for saw only its end."""
    pair, prompt = ("HP1", "HD1"), fresh_prompt(num_tokens)
    moved_bytes(fleet, pair, run, tally, Question((prompt,)))
    for shared in range(len(prompt) // BLOCK * BLOCK, len(prompt) - WINDOW, -BLOCK):
        question = Question(((*prompt[:shared], *fresh_prompt(7)),))
        answers = run(lambda client, asked=question: ask(client, fleet.engine("HD1").url, asked))
        tally.demand_right(answers, run(lambda client, asked=question: ask(client, fleet.engine("HP1").url, asked)))


@pytest.mark.parametrize(
    ("pair", "layer", "plane"),
    [(("HP1", "HD1"), layer, plane) for layer in (SLIDING, FULL) for plane in (KEY, VALUE)]
    + [(("LP1", "LD1"), layer, KEY) for layer in (0, LATENT.num_layers - 1)],
)
def test_a_spoilt_block_is_heard(fleet, run, fresh_prompt, pair, layer, plane):
    """In every layer and every block that its tokens see; no other block of a sliding layer has come at all."""
    size = 16 if pair[1].startswith("L") else BLOCK
    num_blocks, moves = 5, {}
    prefill, decode = (fleet.engine(name).url for name in pair)
    for block in range(num_blocks):
        question = Question((fresh_prompt(num_blocks * size - 3),), num_answer_tokens=1)
        with corrupt_block(fleet.hooks(pair[1]), block, plane, layer):
            (answer,) = run(lambda client, asked=question: ask_by_hand(client, prefill, decode, asked))
        (alone,) = run(lambda client, asked=question: ask(client, prefill, asked))
        moves[block] = largest_move(answer, alone)
    unseen = {0, 1} if (pair[1], layer) == ("HD1", SLIDING) else set()
    assert {block for block, move in moves.items() if move < NOTICEABLE} == unseen, moves


def test_the_last_window_of_a_prompt_is_kept_while_its_engine_answers_too(fleet, run, tally, fresh_prompt):
    """By then the windows of the prefill engine have left the prompt behind."""
    question = Question((fresh_prompt(5 * BLOCK + 3),))
    body = question.body() | {"max_tokens": WINDOW + BLOCK, "kv_transfer_params": dict(PREFILL_PARAMS)}
    reply = run(lambda client: complete(client, fleet.engine("HP1").url, body))
    before = bytes_received(fleet.engine("HD1"))
    answers = run(lambda client: ask_with(client, fleet.engine("HD1").url, question, reply["kv_transfer_params"]))
    assert bytes_received(fleet.engine("HD1")) - before == num_bytes(("HP1", "HD1"), len(question.prompts[0]))
    tally.demand_right(answers, run(lambda client: ask(client, fleet.engine("HP1").url, question)))


def test_a_load_that_fails_is_computed_by_a_model_of_several_groups(fleet, run, tally, fresh_prompt):
    question = Question((fresh_prompt(5 * BLOCK),))
    params = run(lambda client: prefill_only(client, fleet.engine("LP1").url, question))
    answers = run(lambda client: ask_with(client, fleet.engine("HD1").url, question, params))
    tally.demand_right(answers, run(lambda client: ask(client, fleet.engine("HP1").url, question)))
    assert "fingerprint differs" in fleet.engine("HD1").program.log.read_text()


def test_nothing_stays_open(fleet, run, tally, fresh_prompt):
    moved_bytes(fleet, ("HP1", "HD1"), run, tally, Question((fresh_prompt(5 * BLOCK),)))
    left = {}

    def is_quiet():
        left.update({name: open_things(engine) for name, engine in fleet.engines.items()})
        return not any(left.values())

    assert wait_until(is_quiet, timeout_s=DEADLINE_S) < DEADLINE_S, left
