"""The page of settings is made from the classes that read them, and the classes do what it says."""

import dataclasses

import pytest
from docs import settings

from kv_core.errors import CallerError
from kv_engine_adapter.config import ferry_config
from kv_transfer.config import RANGES, ConfigError, TransferConfig

NUMBERS = [field.name for field in dataclasses.fields(TransferConfig) if field.name in RANGES]


def test_the_page_is_what_the_tool_writes():
    assert settings.FILE.read_text() == settings.text()


def test_every_key_of_the_page_is_taken_and_no_other():
    for setting in settings.settings():
        with pytest.raises(CallerError, match=r"kv_connector_extra_config: (?!unknown keys)"):
            ferry_config({setting.key: ["of", {"no": "type"}]})
    with pytest.raises(CallerError, match="unknown keys"):
        ferry_config({"no_such_key": 1})


def test_every_number_has_a_range_and_a_side_is_one_that_there_is():
    plain = {field.name for field in dataclasses.fields(TransferConfig) if field.type in (int, float, int | None)}
    assert plain <= set(RANGES)
    assert set(settings.SIDES) <= {each.key for each in settings.settings()}
    assert {each.side for each in settings.settings()} == {"prefill", "decode", "both"}


@pytest.mark.parametrize("key", NUMBERS)
def test_both_ends_of_a_range_are_allowed_and_nothing_beyond(key):
    least, most = RANGES[key]
    room = {} if key.endswith("arena_bytes") else {"send_arena_bytes": 1 << 44, "receive_arena_bytes": 1 << 44}
    for allowed in (least, most):
        assert getattr(TransferConfig(**{**room, key: allowed}), key) == allowed
    for beyond in (least - 0.001 if isinstance(least, float) else least - 1, most + 1):
        with pytest.raises(ConfigError, match=rf"{key} is out of range: got={beyond}"):
            TransferConfig(**{**room, key: beyond})
