"""What the operator decides about the host and disk tiers; part of `kv_connector_extra_config`.

Law: without `tier_host_bytes` there are no tiers and nothing of them runs. Directories come from here alone.
"""

from dataclasses import dataclass

from kv_core.errors import CallerError
from kv_engine_adapter.tier_terms import COSTS, BreakEven

_ASSUMED = {"recompute_token_s": 1e-4, "host_byte_s": 2e-10, "disk_byte_s": 2e-9, "start_s": 0.0}


@dataclass(frozen=True, slots=True)
class TierConfig:
    """The settings of the tiers, one for each key."""

    tier_host_bytes: int = 0
    """Host memory in which prefixes of ended requests are kept, all ranks together; pinned on a GPU. 0: none."""
    tier_disk_dir: str | None = None
    """Directory, absolute and ours alone (0700), to which they go on; engines of one user may share it."""
    tier_disk_bytes: int = 0
    """How much of the disk they may take, all engines that share the directory together."""
    tier_disk_wait_s: float = 2.0
    """How long a prompt waits for the disk before it is computed."""
    tier_verify: bool = False
    """Check blocks in host memory before they are loaded; those on disk always are. A block that fails is a load that
    fails: set `kv_load_failure_policy` to "recompute"."""
    tier_recompute_token_s: float | None = None
    """What computing a token of a prompt costs: tokens are loaded where that costs less. None: as the engine's steps
    tell."""
    tier_host_byte_s: float | None = None
    """What loading a byte from host memory costs, all ranks together. None: measured at the start."""
    tier_disk_byte_s: float | None = None
    """What reading a byte from disk costs, all ranks together. None: measured at the start."""
    tier_start_s: float | None = None
    """What any load costs, however short. None: a step of the engine that computes no prompt."""

    def __post_init__(self) -> None:
        if min(self.tier_host_bytes, self.tier_disk_bytes) < 0 or not self.tier_disk_wait_s >= 0:
            raise CallerError(
                f"sizes and times of tiers are not negative: tier_host_bytes={self.tier_host_bytes}, "
                f"tier_disk_bytes={self.tier_disk_bytes}, tier_disk_wait_s={self.tier_disk_wait_s}"
            )
        if (self.tier_disk_dir is None) != (self.tier_disk_bytes == 0):
            both = f"tier_disk_dir={self.tier_disk_dir!r}, tier_disk_bytes={self.tier_disk_bytes}"
            raise CallerError(f"a disk tier has a directory and a size: {both}")
        if self.tier_disk_dir is not None and not (self.tier_disk_dir.startswith("/") and self.tier_host_bytes):
            both = f"tier_disk_dir={self.tier_disk_dir!r}, tier_host_bytes={self.tier_host_bytes}"
            raise CallerError(f"a disk tier has an absolute directory, and is reached through host memory: {both}")
        _ = self.break_even

    @property
    def break_even(self) -> BreakEven:
        """What is given, and what is assumed until it is measured."""
        given = {name: value for name in COSTS if (value := self._given(name)) is not None}
        return BreakEven(**(_ASSUMED | given))

    @property
    def measured(self) -> frozenset[str]:
        """The costs that are not given."""
        return frozenset(name for name in COSTS if self._given(name) is None)

    def _given(self, name: str) -> float | None:
        value: float | None = getattr(self, f"tier_{name}")
        return value
