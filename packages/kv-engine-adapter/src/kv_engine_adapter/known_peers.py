"""Which hosts this engine exchanges KV with: configured, never guessed from what a client sends.

In:  the `peers` setting: numeric addresses and networks (CIDR), and "localhost".
Out: whether a `remote_host` of `kv_transfer_params` may be called.
Law: a host that is not listed is refused before anything is sent to it. Without a setting only this machine is listed.
     Names are not looked up: any other name may be listed, and is compared, but nobody is called by it (`wire`).
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kv_core.errors import CallerError

LOOPBACK: Final = ("127.0.0.0/8", "::1/128", "localhost")

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class KnownPeers:
    """The hosts that may be called."""

    networks: tuple[_Network, ...]
    names: frozenset[str]

    @classmethod
    def of(cls, entries: Iterable[str]) -> "KnownPeers":
        """Read addresses, networks and names (see above); `CallerError` for an entry that is none of these."""
        networks: list[_Network] = []
        names: set[str] = set()
        for entry in entries:
            try:
                networks.append(ipaddress.ip_network(entry, strict=False))
            except ValueError as error:
                if not entry or "/" in entry or ":" in entry or " " in entry:
                    raise CallerError(f"peers: {entry!r} is no address, network or host name: {error}") from error
                names.add(entry.lower())
        return cls(tuple(networks), frozenset(names))

    def allows(self, host: str) -> bool:
        """Whether `host`, an address or a name, is listed; names are compared, never resolved."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host.lower() in self.names
        return any(address in network for network in self.networks)

    def __str__(self) -> str:
        return ", ".join([*map(str, self.networks), *sorted(self.names)])
