"""Why a prefix was not read or not written: one word each, and how often.

In:  what happened, from any thread.
Out: Counts, a snapshot.
Law: a failure of the disk is one of these words and nothing else; it never leaves the store as an exception.
"""

import errno
import threading
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Miss(StrEnum):
    """Why not."""

    ABSENT = "absent"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    OTHER_FORMAT = "other_format"
    OTHER_MODEL = "other_model"
    OTHER_HASH_RULE = "other_hash_rule"
    OTHER_CONTENT = "other_content"
    NOT_PERMITTED = "not_permitted"
    UNREADABLE = "unreadable"
    DISK_FULL = "disk_full"
    QUOTA = "quota"
    BUSY = "busy"
    HOLE = "hole"
    CLOSED = "closed"


DAMAGE: Final = frozenset(
    {Miss.TRUNCATED, Miss.CORRUPT, Miss.OTHER_FORMAT, Miss.OTHER_MODEL, Miss.OTHER_HASH_RULE, Miss.OTHER_CONTENT}
)
"""The file can never be read in its place, so it is removed."""

_OF_ERRNO: Final = {
    errno.ENOENT: Miss.ABSENT,
    errno.EACCES: Miss.NOT_PERMITTED,
    errno.EPERM: Miss.NOT_PERMITTED,
    errno.EROFS: Miss.NOT_PERMITTED,
    errno.ENOSPC: Miss.DISK_FULL,
    errno.EDQUOT: Miss.DISK_FULL,
}


class Missed(Exception):
    """Carries a Miss to where it is counted; stays within the store."""

    def __init__(self, why: Miss) -> None:
        super().__init__(why)
        self.why = why


def why_of(error: "OSError | Missed") -> Miss:
    """The word for an error."""
    if isinstance(error, Missed):
        return error.why
    return _OF_ERRNO.get(error.errno or 0, Miss.UNREADABLE)


class Counts:
    """Counters by name: a Miss with what it kept from happening ("read absent"), or what did happen, in bytes etc."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        """So many more."""
        with self._lock:
            self._counts[name] += number

    def snapshot(self) -> Mapping[str, int]:
        """All counters that are not zero."""
        with self._lock:
            return dict(self._counts)
