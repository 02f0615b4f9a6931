"""Keys: golden digests, chaining, and everything that must tell two contents apart."""

import os
import subprocess
import sys
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kv_core.errors import CallerError
from kv_core.keys import KEY_BYTES, Scope, block_keys, prompt_key

token_lists = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)
extras = st.lists(st.tuples(st.binary(min_size=1, max_size=4), st.integers(0, 39)), max_size=3).map(tuple)
names = st.none() | st.text(max_size=3)
scopes = st.builds(Scope, lora=names, salt=names, extras=extras)

FULL = Scope(lora="sql", salt="tenant-7", extras=((bytes(range(32)), 2), (b"second", 5)))

# Peers of other versions compare these: a change of any digest is a change of the wire.
GOLDEN_BLOCKS = {
    "plain": (
        Scope(),
        [
            "b117ef153e23627a52a1f281138977073d63289181058e0d02d74f02ea723710",
            "05c446a01622f279139b05833b38cfcfee289b6a0178c4b5f371a5f172b40b4a",
        ],
    ),
    "full": (
        FULL,
        [
            "3f9830affe77edc7f23a30ce3845e1112c75c747593e996924a1b7510db4a65f",
            "4de42d02be86986d9c2294cd1f9d292d6b51d3456e30338455b219c01947bc10",
        ],
    ),
}
GOLDEN_PROMPTS = {
    "plain": (Scope(), "54280d4de20a6a1c954ace38dc4b2e2361d9e6e2c0e5d65794c14ed06978699e"),
    "full": (FULL, "5f90af543a180a6fccb9b164d1f5aa023ca181979e665449dc09619fad24d1cd"),
}
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, -1]


@pytest.mark.parametrize("name", GOLDEN_BLOCKS)
def test_golden_block_keys(name):
    scope, expected = GOLDEN_BLOCKS[name]
    assert [key.hex() for key in block_keys(TOKENS, scope, 4)] == expected


@pytest.mark.parametrize("name", GOLDEN_PROMPTS)
def test_golden_prompt_keys(name):
    scope, expected = GOLDEN_PROMPTS[name]
    assert prompt_key(TOKENS, scope).hex() == expected


@pytest.mark.parametrize("hash_seed", ["0", "1", "4711"])
def test_keys_do_not_depend_on_the_hash_seed_of_the_process(hash_seed):
    script = (
        "from kv_core.keys import *\n"
        f"scope = {FULL!r}\n"
        f"print(*(key.hex() for key in block_keys({TOKENS}, scope, 4)), prompt_key({TOKENS}, scope).hex())"
    )
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    printed = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.split() == [*GOLDEN_BLOCKS["full"][1], GOLDEN_PROMPTS["full"][1]]


@given(token_lists, scopes, st.integers(1, 9))
def test_only_full_blocks_have_keys_and_all_differ(tokens, scope, tokens_per_block):
    keys = block_keys(tokens, scope, tokens_per_block)
    assert len(keys) == len(tokens) // tokens_per_block
    assert len(set(keys)) == len(keys)
    assert all(len(key) == KEY_BYTES for key in keys)


@given(token_lists, token_lists, scopes, st.integers(1, 9))
def test_a_longer_prompt_keeps_the_keys_of_its_prefix(prefix, rest, scope, tokens_per_block):
    keys = block_keys(prefix, scope, tokens_per_block)
    assume(all(start < len(keys) * tokens_per_block for _, start in scope.extras))
    assert block_keys(prefix + rest, scope, tokens_per_block)[: len(keys)] == keys


@given(token_lists.filter(bool), scopes, st.data())
def test_one_changed_token_changes_its_block_and_all_later_ones_only(tokens, scope, draw):
    at = draw.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    before, after = block_keys(tokens, scope, 4), block_keys(changed, scope, 4)
    assert before[: at // 4] == after[: at // 4]
    assert not set(before[at // 4 :]) & set(after[at // 4 :])


@given(token_lists.filter(bool), scopes, scopes)
def test_adapter_and_salt_isolate_every_block(tokens, one, other):
    assume((one.lora, one.salt) != (other.lora, other.salt))
    assert not set(block_keys(tokens, one, 1)) & set(block_keys(tokens, other, 1))


def test_absent_empty_and_exchanged_names_are_all_different():
    names = [None, "", "a", "b"]
    keys = {prompt_key([1], Scope(lora=lora, salt=salt)) for lora in names for salt in names}
    assert len(keys) == len(names) ** 2


def test_an_item_changes_its_first_block_and_all_later_ones_only():
    tokens = [100000] * 16
    plain = block_keys(tokens, Scope(), 4)
    variants = [
        block_keys(tokens, Scope(extras=((digest, start),)), 4)
        for digest, start in [(b"cat", 5), (b"dog", 5), (b"cat", 6)]
    ]
    for one, other in combinations([plain, *variants], 2):
        assert one[0] == other[0]
        assert not set(one[1:]) & set(other[1:])


def test_the_same_item_a_block_later_is_another_content():
    tokens = [100000] * 16
    early, late = (block_keys(tokens, Scope(extras=((b"cat", start),)), 4) for start in (1, 5))
    assert not set(early) & set(late)


def test_the_order_in_which_items_are_listed_does_not_matter():
    listed = ((b"cat", 1), (b"dog", 9), (b"ant", 9))
    tokens = list(range(12))
    assert block_keys(tokens, Scope(extras=listed), 4) == block_keys(tokens, Scope(extras=listed[::-1]), 4)
    assert prompt_key(tokens, Scope(extras=listed)) == prompt_key(tokens, Scope(extras=listed[::-1]))


@given(token_lists, token_lists, scopes)
def test_prompts_share_a_key_only_when_equal(one, other, scope):
    assume(all(start < min(len(one), len(other)) for _, start in scope.extras))
    assert (prompt_key(one, scope) == prompt_key(other, scope)) == (one == other)


def test_a_prompt_key_is_never_a_block_key():
    assert prompt_key([1, 2, 3, 4], Scope()) not in block_keys([1, 2, 3, 4], Scope(), 4)


def test_no_tokens_have_no_blocks_yet_a_prompt_key():
    assert block_keys([], Scope(), 4) == []
    assert prompt_key([], Scope()) != prompt_key([], Scope(salt=""))


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 1.5, "1"])
def test_a_token_outside_of_32_bits_is_refused(token):
    with pytest.raises(CallerError, match="32-bit"):
        block_keys([1, token], Scope(), 1)
    with pytest.raises(CallerError, match="32-bit"):
        prompt_key([token], Scope())


def test_broken_promises_are_named_with_their_values():
    with pytest.raises(CallerError, match="tokens_per_block=0"):
        block_keys([1], Scope(), 0)
    with pytest.raises(CallerError, match="start=-1"):
        Scope(extras=((b"cat", -1),))
    with pytest.raises(CallerError, match="digest=''"):
        Scope(extras=((b"", 0),))
    with pytest.raises(CallerError, match="num_tokens=2"):
        prompt_key([1, 2], Scope(extras=((b"cat", 2),)))
