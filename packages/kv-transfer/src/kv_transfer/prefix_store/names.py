"""Names of directories and files in a store: what they tell, and nothing a stranger chose.

In:  fingerprint, hash rule and shape of a cache; keys; boxes.
Out: names, and what names tell.
Law: names are made of numbers and hexadecimal digits. A name that is not exactly one that we would write is no record.

    v<format>-<hash rule, 16 digits>-<model, 32 digits>/<2 digits>/<64 digits>/l0-32.h0-4.t16.p35.x0
                                                        `----- key -----'      layers, heads, tokens, priority, until
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from kv_core.errors import CallerError
from kv_core.keys import KEY_BYTES, BlockKey
from kv_core.retention import DEFAULT_PRIORITY
from kv_core.spans import Span
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.prefix_store.boxes import Box

FORMAT_VERSION: Final = 1
NAMESPACE: Final = re.compile(r"v(\d{1,9})-([0-9a-f]{16})-([0-9a-f]{32})", re.ASCII)
_NUMBER: Final = r"(0|[1-9]\d{0,11})"
_RECORD: Final = re.compile(
    rf"l{_NUMBER}-{_NUMBER}\.h{_NUMBER}-{_NUMBER}\.t{_NUMBER}\.p{_NUMBER}\.x{_NUMBER}", re.ASCII
)
_KEY: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Namespace:
    """What all records of one directory share, as digests of 32 bytes."""

    rule: bytes
    model: bytes

    @classmethod
    def of(cls, state: CacheState, hash_rule: str, tokens_per_record: int) -> "Namespace":
        """How the instance is cut and how blocks lie in memory have no part in it."""
        rule = msgspec.json.encode([hash_rule, tokens_per_record])
        shape = [state.fingerprint, state.attention, state.dtype, state.head_size, state.num_planes]
        shape += [state.num_layers, state.num_kv_heads, state.scales]
        return cls(sha256(rule).digest(), sha256(msgspec.json.encode(shape)).digest())

    @property
    def folder(self) -> str:
        return f"v{FORMAT_VERSION}-{self.rule.hex()[:16]}-{self.model.hex()[:32]}"


@dataclass(frozen=True, slots=True)
class RecordName:
    """One file of a key: which part of the model it holds, and how long it is worth keeping.

    From `expires_at` on, in seconds since 1970, the priority is the usual one; 0 is never.
    """

    box: Box
    num_tokens: int
    priority: int = DEFAULT_PRIORITY
    expires_at: int = 0

    def __str__(self) -> str:
        layers, heads = self.box.layers, self.box.heads
        part = f"l{layers.start}-{layers.stop}.h{heads.start}-{heads.stop}"
        return f"{part}.t{self.num_tokens}.p{self.priority}.x{self.expires_at}"

    @classmethod
    def parse(cls, text: str) -> "RecordName | None":
        """None for any other name."""
        if (found := _RECORD.fullmatch(text)) is None:
            return None
        first_layer, last_layer, first_head, last_head, tokens, priority, until = map(int, found.groups())
        if not (first_layer < last_layer and first_head < last_head and tokens):
            return None
        return cls(Box(Span(first_layer, last_layer), Span(first_head, last_head)), tokens, priority, until)

    def priority_at(self, now: float) -> int:
        """The priority that counts at this time."""
        return DEFAULT_PRIORITY if self.expires_at and now >= self.expires_at else self.priority


@dataclass(frozen=True, slots=True)
class Found:
    """A record's file, as a directory shows it; `used_at` in seconds since 1970."""

    path: Path
    name: RecordName
    num_bytes: int
    used_at: float

    @property
    def key(self) -> BlockKey:
        return BlockKey(bytes.fromhex(self.path.parent.name))


def key_folder(key: BlockKey) -> Path:
    """Where a key's files are, below its namespace; CallerError for what is no key."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise CallerError(f"no key: got={key!r:.80}, wanted={KEY_BYTES} bytes")
    digits = key.hex()
    return Path(digits[:2]) / digits


def records_in(folder: Path) -> list[RecordName]:
    """What the folder of a key holds now; nothing if it is not there. OSError if it cannot be looked at."""
    try:
        names = [RecordName.parse(path.name) for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    return [name for name in names if name is not None]


def scan(namespace: Path) -> Iterator[list[Found]]:
    """The files of each key of a namespace, key by key. What vanishes or cannot be looked at is left out."""
    for shard in _folders(namespace):
        for folder in _folders(shard):
            if _KEY.fullmatch(folder.name) and (found := list(_files(folder))):
                yield found


def _folders(parent: Path) -> list[Path]:
    try:
        return [path for path in parent.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def _files(folder: Path) -> Iterator[Found]:
    try:
        paths = list(folder.iterdir())
    except OSError:
        return
    for path in paths:
        name = RecordName.parse(path.name)
        try:
            seen = path.lstat()
        except OSError:
            continue
        if name is not None:
            yield Found(path, name, seen.st_size, seen.st_mtime)
