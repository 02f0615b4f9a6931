"""Hints of retention in a request's extra arguments: each form read, each bad one refused with value and reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.retention import RangeRetention, Retention, RetentionConfig
from kv_engine_adapter.retain import MAX_RANGES, NO_HINTS, hints_of


def test_ranges_as_clients_write_them():
    hints = hints_of({"kvferry.retain": ["0-2048:90:600s", "2048-:20"], "temperature": 1})
    assert hints.ranges == (RangeRetention(0, 2048, 90, 600_000), RangeRetention(2048, None, 20))
    assert hints.decode is None
    assert hints.refused == ()


@pytest.mark.parametrize(("text", "milliseconds"), [
    ("5-6:0", None), ("5-6:100:0s", 0), ("5-6:1:250ms", 250), ("5-6:1:2m", 120_000), ("5-6:1:720h", 2_592_000_000),
])  # fmt: skip
def test_durations_have_units(text, milliseconds):
    (wish,) = hints_of({"kvferry.retain": text}).ranges
    assert wish.duration_ms == milliseconds


@pytest.mark.parametrize(("value", "wish"), [
    (10, Retention(10)), ("10", Retention(10)), ("0:60s", Retention(0, 60_000)), (100, Retention(100)),
])  # fmt: skip
def test_decoded_tokens_have_a_wish_of_their_own(value, wish):
    assert hints_of({"kvferry.decode_priority": value}).decode == wish
    assert hints_of({"kvferry": {"decode_priority": value}}).decode == wish


def test_one_mapping_says_the_same():
    flat = hints_of({"kvferry.retain": ["0-9:80"], "kvferry.decode_priority": 3})
    assert hints_of({"kvferry": {"retain": ["0-9:80"], "decode_priority": 3}}) == flat


def test_without_hints_nothing_is_wished():
    for arguments in (None, {}, {"other": 1, "kvferries": 2}):
        assert hints_of(arguments) is NO_HINTS
    assert NO_HINTS.config(100) is None


def test_wishes_end_with_the_prompt_and_decoding_begins_there():
    hints = hints_of({"kvferry.retain": ["0-10:90", "10-500:40:1s", "500-:5"], "kvferry.decode_priority": "7:2s"})
    assert hints.config(100) == RetentionConfig(
        (RangeRetention(0, 10, 90), RangeRetention(10, 100, 40, 1000), RangeRetention(100, None, 7, 2000))
    )
    assert hints_of({"kvferry.retain": ["50-60:90"]}).config(50) is None


BAD = [
    ("kvferry.retain", 5, "expected a list"),
    ("kvferry.retain", None, "expected a list"),
    ("kvferry.retain", {"0-5": 90}, "expected a list"),
    ("kvferry.retain", [7], "got 7"),
    ("kvferry.retain", ["0-5"], "'0-5'"),
    ("kvferry.retain", ["-5:90"], "'-5:90'"),
    ("kvferry.retain", ["0-5:90:600"], "600"),
    ("kvferry.retain", ["0-5:90:6 s"], "6 s"),
    ("kvferry.retain", ["0-5:-1"], "-1"),
    ("kvferry.retain", ["0-5:101"], "priority=101"),
    ("kvferry.retain", ["5-5:90"], "start=5, stop=5"),
    ("kvferry.retain", ["6-5:90"], "start=6, stop=5"),
    ("kvferry.retain", ["0-9:90", "8-12:20"], "overlap"),
    ("kvferry.retain", ["0-:90", "8-12:20"], "overlap"),
    ("kvferry.retain", ["0-5:90:721h"], "30 days"),
    ("kvferry.retain", ["\u0660-5:90"], "expected start"),
    ("kvferry.retain", ["0-5:90\n"], "expected start"),
    ("kvferry.retain", ["0-99999999999:90"], "expected start"),
    ("kvferry.retain", [f"{i}-{i + 1}:1" for i in range(MAX_RANGES + 1)], f"at most {MAX_RANGES}"),
    ("kvferry.retain", "x" * 10_000, "expected start"),
    ("kvferry.decode_priority", True, "expected priority"),
    ("kvferry.decode_priority", 1.5, "expected priority"),
    ("kvferry.decode_priority", -1, "expected priority"),
    ("kvferry.decode_priority", 101, "priority=101"),
    ("kvferry.decode_priority", "10:60", "expected priority"),
    ("kvferry.decode_priority", [10], "expected priority"),
    ("kvferry.directory", "/somewhere", "no such hint"),
    ("kvferry.transfer_directory", "/somewhere", "no such hint"),
    ("kvferry.", 1, "no such hint"),
    ("kvferry", "retain", "no such hint"),
]


@pytest.mark.parametrize(("key", "value", "reason"), BAD)
def test_a_bad_hint_is_refused_with_its_value_and_the_reason(key, value, reason):
    (refusal,) = hints_of({key: value}).refused
    assert refusal.key.startswith("kvferry.")
    assert refusal.value == f"{value!r:.80}"
    assert reason in refusal.reason
    assert len(str(refusal)) < 400


def test_a_bad_hint_leaves_the_others_standing():
    hints = hints_of({"kvferry.retain": ["0-5:900"], "kvferry.decode_priority": 4, "kvferry.directory": "/x"})
    assert hints.decode == Retention(4)
    assert hints.ranges == ()
    assert [refusal.key for refusal in hints.refused] == ["kvferry.retain", "kvferry.directory"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.from_regex(r"\d+-\d*:\d+.*"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["kvferry.retain", "kvferry.decode_priority", "kvferry", "x"]), VALUES),
       st.integers(1, 3000))  # fmt: skip
def test_no_client_can_raise(arguments, num_prompt_tokens):
    hints = hints_of(arguments)
    config = hints.config(num_prompt_tokens)
    assert config is None or config.per_block(32, num_prompt_tokens + 64)
