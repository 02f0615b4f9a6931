"""Tokens as bytes: equal bytes mean equal tokens, told once or piece by piece."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import CallerError
from kv_core.keys import Scope, block_keys, chain_keys, scope_key
from kv_core.spans import Span
from kv_core.token_log import TokenLog, packed, unpacked

TOKENS = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=40)
EXTRAS = st.integers(0, (1 << 64) - 1)


@given(TOKENS)
def test_packing_keeps_every_token(tokens):
    assert unpacked(packed(tokens), 4) == (tuple(tokens), None)


@given(st.lists(st.tuples(st.integers(-(1 << 31), (1 << 31) - 1), EXTRAS), max_size=20))
def test_packing_keeps_every_extra_id(pairs):
    tokens, extras = [token for token, _ in pairs], [extra for _, extra in pairs]
    log = TokenLog(tokens, Scope(), 4, extras)
    assert unpacked(log.content(0, len(log)), log.width) == (tuple(tokens), tuple(extras))


@given(TOKENS, st.integers(0, 40))
def test_tokens_told_in_pieces_are_the_same_tokens(tokens, cut):
    whole, pieces = TokenLog(tokens, Scope(), 4), TokenLog(tokens[:cut], Scope(), 4)
    pieces.extend(tokens[cut:])
    assert len(pieces) == len(tokens)
    assert pieces.told == whole.told
    pieces.truncate(cut)
    assert pieces.told == whole.content(0, cut)


@given(TOKENS)
def test_keys_of_a_log_are_those_of_its_tokens(tokens):
    scope = Scope("a", "s", ((b"x", 3), (b"y", 9)))
    log = TokenLog(tokens, scope, 4)
    keys = chain_keys(scope_key(scope), log.content(0, len(tokens) // 4 * 4), 16, Span(0, len(tokens) // 4), log.items)
    assert keys == block_keys(tokens, scope, 4)


def test_tokens_are_taken_back_and_told_anew():
    log = TokenLog([1, 2, 3], Scope(), 4)
    log.extend([4])
    log.truncate(1)
    log.extend([5])
    assert log.told == packed([1, 5])


def test_one_token_of_32_bits_has_two_spellings():
    assert packed([-1]) == packed([0xFFFFFFFF])


@pytest.mark.parametrize("token", [1 << 32, -(1 << 31) - 1, "a", None, 1.5])
def test_what_is_no_token_is_refused(token):
    with pytest.raises(CallerError):
        packed([token])


def test_extending_with_what_is_no_token_tells_nothing():
    log = TokenLog([1, 2], Scope(), 4)
    with pytest.raises(CallerError):
        log.extend([3, 1 << 40])
    assert len(log) == 2


@pytest.mark.parametrize("extra", [-1, 1 << 64])
def test_extra_ids_have_64_bits(extra):
    with pytest.raises(CallerError):
        TokenLog([1], Scope(), 4, [extra])
