"""What the operator decides about a store of prefixes.

In:  settings of the engine, never of a request.
Out: StoreConfig.
Law: the directory comes from here alone. No call of the store takes a path, and requests name prefixes by keys, which
become hexadecimal digits: no request can name a directory.
"""

from dataclasses import dataclass
from pathlib import Path

from kv_core.errors import CallerError
from kv_transfer.plan.cache_state import MAX_NAME_LENGTH, MAX_TOKENS_PER_BLOCK


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """`directory` belongs to us alone (mode 0700); engines of one user may share it, and share `quota_bytes`.

    `hash_rule` names how keys are computed; it includes the seed where the engine's hash has one per process. With
    `sync` a record is on the disk before it is there. `max_indexed` keys are remembered, about 1 KiB each.
    """

    directory: Path
    quota_bytes: int
    hash_rule: str = "kvferry block 1"
    tokens_per_record: int = 16
    sync: bool = False
    max_indexed: int = 65536
    lock_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.directory.is_absolute():
            raise CallerError(f"the store's directory is not absolute: {self.directory}")
        if not 0 < len(self.hash_rule) <= MAX_NAME_LENGTH:
            raise CallerError(f"hash_rule is empty or too long: characters={len(self.hash_rule)}")
        if not 0 < self.tokens_per_record <= MAX_TOKENS_PER_BLOCK:
            raise CallerError(
                f"tokens_per_record out of bounds: got={self.tokens_per_record}, allowed=1..{MAX_TOKENS_PER_BLOCK}"
            )
        if self.quota_bytes < 1 or self.max_indexed < 1 or self.lock_timeout_s < 0:
            sizes = f"quota_bytes={self.quota_bytes}, max_indexed={self.max_indexed}"
            raise CallerError(f"a store needs room: {sizes}, lock_timeout_s={self.lock_timeout_s}")
