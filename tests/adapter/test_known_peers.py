"""Which hosts may be called."""

import pytest

from kv_core.errors import CallerError
from kv_engine_adapter.config import ferry_config
from kv_engine_adapter.known_peers import KnownPeers


@pytest.mark.parametrize(("host", "allowed"), [
    ("10.1.2.3", True), ("10.2.0.1", False), ("fd00::7", True), ("fe80::1", False), ("Prefill.Example", True),
    ("example", False), ("", False), ("10.1.2.3.", False), ("010.1.2.3", False),
])  # fmt: skip
def test_addresses_networks_and_names(host, allowed):
    peers = KnownPeers.of(["10.1.0.0/16", "fd00::/64", "prefill.example"])
    assert peers.allows(host) is allowed


def test_without_a_setting_only_this_machine_is_known():
    peers = ferry_config({}).peers
    assert [peers.allows(host) for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1")] == [True, True, True, False]


def test_our_own_address_is_known():
    assert ferry_config({"bind_host": "0.0.0.0", "advertised_host": "10.0.0.5", "peers": []}).peers.allows("10.0.0.5")


@pytest.mark.parametrize("entry", ["10.0.0.0/99", "a b", "", "host:80"])
def test_an_entry_that_is_nothing_of_these_is_refused(entry):
    with pytest.raises(CallerError, match="peers"):
        ferry_config({"peers": [entry]})
