"""A byte-level tokenizer of 512 entries with a chat template, small enough to be made on the spot.

In:  nothing.
Out: the contents of tokenizer.json and tokenizer_config.json.
Law: any text survives encoding and decoding; printable pieces come last, so that everything before `FIRST_SPOKEN`
     (special tokens and bytes that are no printable ASCII) can be kept silent and answers are readable.
"""

import json
from itertools import product

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, END_OF_TURN, *ROLES)

VOCAB_SIZE = 512
_SPACE = "\u0120"  # how the byte-level alphabet writes a space
_NUM_PRINTABLE = 95
FIRST_SPOKEN = len(SPECIAL_TOKENS) + 256 - _NUM_PRINTABLE

CHAT_TEMPLATE = (
    "{{ '" + BOS + "' }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '" + END_OF_TURN + "' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer_json() -> str:
    """A BPE over bytes whose merges are syllables of two letters, with and without a space before them."""
    merges = _merges()
    pieces = [*SPECIAL_TOKENS, *_alphabet(), *(left + right for left, right in merges)][:VOCAB_SIZE]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    merges = [(left, right) for left, right in merges if left + right in vocab]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return str(tokenizer.to_str(pretty=True))


def tokenizer_config_json(max_position: int) -> str:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position,
        "chat_template": CHAT_TEMPLATE,
    }
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def _alphabet() -> list[str]:
    """The 256 byte symbols; those of printable ASCII last."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {_SPACE, *(chr(code) for code in range(33, 127))}
    return [symbol for symbol in symbols if symbol not in printable] + [s for s in symbols if s in printable]


def _merges() -> list[tuple[str, str]]:
    syllables = list(product("tnsrlhdmcp", "eaiou")) + list(product("eaiou", "nrst"))
    spaced = [(_SPACE, left + right) for left, right in syllables]
    longer = list(product("bfgkvwyjzqx", "eaiou")) + list(product("eaiou", "dlmcp"))
    return [*syllables, *spaced, *longer, *((_SPACE, left + right) for left, right in longer)]
