"""What has ended, remembered for a while.

In:  names of things that ended, with a word about it; the time.
Out: that word, when somebody asks for the name again.
Law: bounded in number and in time; the oldest are forgotten first.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)
Word = TypeVar("Word")

MAX_TOMBSTONES: Final = 1 << 17


class Tombstones(Generic[Name, Word]):
    """Words about the ended; of one thread."""

    def __init__(self, remember_s: float, most: int = MAX_TOMBSTONES) -> None:
        self._remember_s = remember_s
        self._most = most
        self._words: OrderedDict[Name, tuple[float, Word]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._words)

    def bury(self, name: Name, word: Word, now: float) -> None:
        """Remember the end of `name` from now on; the newest word counts."""
        self._words.pop(name, None)
        self._words[name] = now + self._remember_s, word
        self._forget(now)

    def word(self, name: Name) -> Word | None:
        """What was said about `name`; None if it is not remembered."""
        found = self._words.get(name)
        return None if found is None else found[1]

    def _forget(self, now: float) -> None:
        while self._words:
            end, _ = next(iter(self._words.values()))
            if len(self._words) <= self._most and end > now:
                return
            self._words.popitem(last=False)
