"""What an operator may write, and what is refused at start."""

from pathlib import Path

import pytest

from kv_core.errors import CallerError
from kv_engine_adapter.config import ferry_config
from kv_engine_adapter.tier_config import TierConfig


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


def test_tiers_are_off_unless_they_have_memory():
    assert ferry_config({}).tier == TierConfig()
    assert TierConfig().tier_host_bytes == 0
    asked = {"tier_host_bytes": 1 << 30, "tier_disk_dir": "/kept", "tier_disk_bytes": 1 << 40, "tier_verify": True}
    assert ferry_config(asked).tier == TierConfig(**asked)


@pytest.mark.parametrize(("keys", "why"), [
    ({"tier_host_bytes": -1}, "tier_host_bytes=-1"),
    ({"tier_host_bytes": "1 GB"}, "tier_host_bytes"),
    ({"tier_host_bytes": 9, "tier_disk_wait_s": -1.0}, "tier_disk_wait_s=-1.0"),
    ({"tier_host_bytes": 9, "tier_disk_dir": "/kept"}, "a directory and a size"),
    ({"tier_host_bytes": 9, "tier_disk_bytes": 9}, "a directory and a size"),
    ({"tier_host_bytes": 9, "tier_disk_dir": "kept", "tier_disk_bytes": 9}, "absolute directory"),
    ({"tier_disk_dir": "/kept", "tier_disk_bytes": 9}, "through host memory"),
    ({"tier_recompute_token_s": -1.0}, "recompute_token_s=-1.0"),
    ({"tier_directory": "/kept"}, "unknown keys"),
])  # fmt: skip
def test_bad_settings_of_tiers_are_refused_at_start(keys, why):
    with pytest.raises(CallerError, match=f"kv_connector_extra_config.*{why}"):
        ferry_config(keys)
