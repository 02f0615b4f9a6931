"""The tiny model listens to every block of its cache, loads like any checkpoint, and always has the same bytes."""

import hashlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from model.make_tiny import ROOT, SHAPES, make_tiny  # noqa: E402
from model.tiny_tokenizer import FIRST_SPOKEN, VOCAB_SIZE  # noqa: E402

TOKENS_PER_BLOCK = 16
KEYS, VALUES = 0, 1
TEXT = "The rain in Spain stays mainly in the plain, and a wrong block of cache must never stay unseen. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(0, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def digests(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def random_prompt(num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_SPOKEN, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


@torch.no_grad()
def cache_of(model, tokens):
    """A list of [keys, values] per layer, each of shape (1, heads, tokens, head size)."""
    cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
    return [[layer.keys.clone(), layer.values.clone()] for layer in cache.layers]


@torch.no_grad()
def next_log_probabilities(model, cache, token):
    past = transformers.DynamicCache()
    for layer, (keys, values) in enumerate(cache):
        past.update(keys.clone(), values.clone(), layer)
    logits = model(torch.tensor([[token]]), past_key_values=past, use_cache=True).logits[0, -1]
    return torch.log_softmax(logits.double(), -1)


def zeros(block):
    return torch.zeros_like(block)


def tokens_exchanged(block):
    return block.flip(2)


def heads_exchanged(block):
    return block.flip(1)


def moves_per_block(model, tokens, plane, corrupt):
    """How far the top-5 log-probabilities move when one block of one plane is corrupt in all layers, block by block."""
    cache = cache_of(model, tokens[:-1])
    right = next_log_probabilities(model, cache, tokens[-1])
    top = right.topk(5).indices
    moves = []
    for start in range(0, len(tokens) - 1, TOKENS_PER_BLOCK):
        block = slice(start, start + TOKENS_PER_BLOCK)
        wrong = [[plane_.clone() for plane_ in layer] for layer in cache]
        for layer in wrong:
            layer[plane][:, :, block] = corrupt(layer[plane][:, :, block])
        moves.append(float((next_log_probabilities(model, wrong, tokens[-1]) - right)[top].abs().max()))
    return moves


@pytest.mark.parametrize("plane", [KEYS, VALUES])
@pytest.mark.parametrize("corrupt", [zeros, heads_exchanged])
@pytest.mark.parametrize("num_tokens", [17, 33, 100, 500])
def test_a_corrupt_block_moves_the_answer_wherever_it_lies(model, num_tokens, corrupt, plane):
    moves = moves_per_block(model, random_prompt(num_tokens), plane, corrupt)
    assert min(moves) > 0.01, moves


@pytest.mark.parametrize("plane", [KEYS, VALUES])
def test_tokens_exchanged_inside_a_block_move_the_answer(model, plane):
    moves = moves_per_block(model, random_prompt(200), plane, tokens_exchanged)
    assert min(moves) > 0.01, moves


@pytest.mark.parametrize("plane", [KEYS, VALUES])
def test_a_corrupt_block_of_a_text_moves_the_answer(model, tokenizer, plane):
    tokens = tokenizer(TEXT * 4)["input_ids"]
    assert len(tokens) > 200
    moves = moves_per_block(model, tokens, plane, zeros)
    assert min(moves) > 0.01, moves


def test_an_untouched_cache_moves_nothing(model):
    assert max(moves_per_block(model, random_prompt(100), KEYS, lambda block: block)) == 0


@torch.no_grad()
def test_float32_is_exact_enough_to_compare_answers(model):
    tokens = torch.tensor([random_prompt(500)])
    single = torch.log_softmax(model(tokens).logits[0].double(), -1)
    model.double()
    try:
        double = torch.log_softmax(model(tokens).logits[0], -1)
    finally:
        model.float()
    top = double.topk(5, -1).indices
    assert (single.gather(-1, top) - double.gather(-1, top)).abs().max() < 2e-5


def test_answers_are_no_constant_and_depend_on_the_whole_prompt(model):
    answers = []
    for first in (300, 301):
        tokens = torch.tensor([[first, *random_prompt(80)]])
        answer = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=64)[0, tokens.shape[1] :]
        assert len(answer) == 64
        assert len(set(answer.tolist())) > 20
        answers.append(answer.tolist())
    assert answers[0] != answers[1]


@pytest.mark.parametrize("text", ["plain words", "h\u00e9llo \u4e16\u754c \U0001f600", "  spaces \n\ttabs", ""])
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_chat_template_marks_roles_and_asks_for_an_answer(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    tokens = tokenizer(prompt)["input_ids"]
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens) == prompt
    assert max(tokens) < VOCAB_SIZE == len(tokenizer)


def test_the_same_seed_gives_the_same_bytes_in_another_process(folder, tmp_path):
    script = ROOT / "tools" / "model" / "make_tiny.py"
    subprocess.run([sys.executable, script, "--out", tmp_path / "again"], check=True, capture_output=True)
    assert digests(tmp_path / "again") == digests(folder)


def test_another_seed_differs_in_weights_and_recipe_only(folder, tmp_path):
    other = digests(make_tiny(1, tmp_path / "other"))
    ours = digests(folder)
    assert {name for name in ours if ours[name] != other[name]} == {"model.safetensors", "recipe.json"}


def test_an_existing_checkpoint_is_kept_and_a_stale_one_replaced(tmp_path):
    target = make_tiny(0, tmp_path / "tiny")
    made = (target / "model.safetensors").stat().st_mtime_ns
    assert (make_tiny(0, target) / "model.safetensors").stat().st_mtime_ns == made
    zero = digests(target)
    assert digests(make_tiny(1, target)) != zero
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_directory_with_other_content_is_never_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="not a tiny model"):
        make_tiny(0, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


OTHER_KINDS = [kind for kind in SHAPES if kind != "llama"]
"""Models with other caches; that their answers listen to each block of each layer is seen end to end."""


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_have_the_same_bytes_again_and_another_seed_other_weights(kind, tmp_path):
    first, again, other = (
        make_tiny(seed, tmp_path / name, SHAPES[kind]) for seed, name in ((0, "a"), (0, "b"), (1, "c"))
    )
    assert digests(first) == digests(again)
    assert {name for name in digests(first) if digests(first)[name] != digests(other)[name]} == {
        "model.safetensors",
        "recipe.json",
    }


@torch.no_grad()
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_listen_to_every_token_that_they_see(kind, tmp_path):
    """One token changed, anywhere in the last 64, and the answer moves; some answer is no constant."""
    folder = make_tiny(0, tmp_path / kind, SHAPES[kind])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = torch.tensor([random_prompt(160)])
    right = torch.log_softmax(model(tokens).logits[0, -1].double(), -1)
    top = right.topk(5).indices
    for position in range(96, 159, 6):
        changed = tokens.clone()
        changed[0, position] = FIRST_SPOKEN + (changed[0, position] - FIRST_SPOKEN + 7) % (VOCAB_SIZE - FIRST_SPOKEN)
        moved = torch.log_softmax(model(changed).logits[0, -1].double(), -1)
        assert float((moved - right)[top].abs().max()) > 0.01, position
    answer = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=32)[0, 160:]
    assert len(set(answer.tolist())) > 8
