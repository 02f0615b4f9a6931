"""Every configuration key of the connector: what an operator writes in `kv_connector_extra_config`.

In:  the mapping from the engine's command line.
Out: one frozen `FerryConfig`.
Law: a key we do not know, a wrong type or a value out of range is refused at start, naming key and value.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from kv_core.errors import CallerError
from kv_engine_adapter.known_peers import LOOPBACK, KnownPeers
from kv_engine_adapter.tier_config import TierConfig
from kv_transfer.config import TransferConfig

IDLE_WAIT_S: Final = 0.002
"""Longer than a load of a short prompt takes to be queued, and twice what vLLM itself pauses after such a step."""
MAX_IDLE_WAIT_S: Final = 0.1
"""A new request may wait as long."""


@dataclass(frozen=True, slots=True)
class FerryConfig:
    """The connector's settings."""

    transfer: TransferConfig
    """Doors, leases, deadlines, staging (see `kv_transfer.config`)."""
    peers: KnownPeers
    """Hosts this engine may fetch from, as numeric addresses and networks; a `remote_host` that is not listed is never
    called."""
    test_hooks_dir: Path | None = None
    """Directory of fault orders for tests; never set it in production."""
    convert_elements: bool = False
    """Convert between the element types of two engines' caches, where the other one asks for it too."""
    idle_wait_s: float = IDLE_WAIT_S
    """How long a step that computes nothing waits for loads that are under way; 0: not at all."""
    tier: TierConfig = field(default_factory=TierConfig)
    """Host and disk tiers (see `tier_config`)."""


_OWN = ("peers", "test_hooks_dir", "convert_elements", "idle_wait_s")


def ferry_config(extra: Mapping[str, object]) -> FerryConfig:
    """Read the mapping; `CallerError` names what is wrong with which key."""
    transfer_keys, tier_keys = (_keys_of(kind) for kind in (TransferConfig, TierConfig))
    known_keys = transfer_keys | tier_keys | set(_OWN)
    unknown = sorted(set(extra) - known_keys)
    if unknown:
        raise CallerError(f"kv_connector_extra_config: unknown keys {unknown}; known are {sorted(known_keys)}")
    try:
        transfer = msgspec.convert({key: extra[key] for key in extra if key in transfer_keys}, TransferConfig)
        tier = msgspec.convert({key: extra[key] for key in extra if key in tier_keys}, TierConfig)
        entries = msgspec.convert(extra.get("peers", list(LOOPBACK)), list[str])
        hooks = msgspec.convert(extra.get("test_hooks_dir"), str | None)
        converts = msgspec.convert(extra.get("convert_elements", False), bool)
        idle_wait_s = msgspec.convert(extra.get("idle_wait_s", IDLE_WAIT_S), float)
    except (msgspec.ValidationError, ValueError) as error:
        raise CallerError(f"kv_connector_extra_config: {error}") from error
    if transfer.own_blocks:
        raise CallerError(
            "kv_connector_extra_config: own_blocks=True, but the blocks are the engine's: only False is safe"
        )
    if not 0 <= idle_wait_s <= MAX_IDLE_WAIT_S:
        raise CallerError(
            f"kv_connector_extra_config: idle_wait_s is out of range: got={idle_wait_s}, allowed=0..{MAX_IDLE_WAIT_S}"
        )
    known = KnownPeers.of([*entries, transfer.call_host])
    return FerryConfig(transfer, known, None if hooks is None else Path(hooks), converts, idle_wait_s, tier)


def _keys_of(kind: type) -> set[str]:
    return {each.name for each in dataclasses.fields(kind)}
