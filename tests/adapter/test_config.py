"""What an operator may write, and what is refused at start."""

from pathlib import Path

import pytest

from kv_core.errors import CallerError
from kv_engine_adapter.config import ferry_config


def test_nothing_need_be_written():
    config = ferry_config({})
    assert config.transfer.lease_s == 30
    assert config.test_hooks_dir is None
    assert not config.convert_elements


def test_keys_of_both_layers_are_read():
    config = ferry_config({"lease_s": 5, "port": 7000, "test_hooks_dir": "/tmp/x", "convert_elements": True})
    assert config.convert_elements
    assert (config.transfer.lease_s, config.transfer.port) == (5, 7000)
    assert config.test_hooks_dir == Path("/tmp/x")


@pytest.mark.parametrize(("extra", "named"), [
    ({"lease": 5}, "lease"), ({"lease_s": "long"}, "float"), ({"port": 70000}, "70000"),
    ({"lease_s": -1}, "lease_s"), ({"bind_host": "0.0.0.0"}, "advertised_host"), ({"test_hooks_dir": 3}, "str"),
    ({"convert_elements": "perhaps"}, "bool"), ({"own_blocks": True}, "own_blocks=True"),
])  # fmt: skip
def test_what_is_wrong_is_named(extra, named):
    with pytest.raises(CallerError, match=named):
        ferry_config(extra)
