"""Transfer ids of client calls: all requests of one call are offered under one id, since the client sees one answer.

In:  the family of a request that is offered now.
Out: its transfer id, random and of 128 bits; the same for the family until it has not been asked for a while.
Law: whoever was not asked for longest is forgotten first, in constant time.
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable

from kv_core.ids import TransferId


class Families:
    """The calls of which a request was offered lately."""

    def __init__(self, kept_s: float, clock: Callable[[], float]) -> None:
        self._kept_s = kept_s
        self._clock = clock
        self._ids: OrderedDict[str, tuple[TransferId, float]] = OrderedDict()

    def transfer_id(self, family: str) -> TransferId:
        """The id of this call; a new one if it is new, or forgotten."""
        now = self._clock()
        while self._ids and now - next(iter(self._ids.values()))[1] > self._kept_s:
            self._ids.popitem(last=False)
        found, _ = self._ids.get(family, (TransferId(secrets.token_hex(16)), now))
        self._ids[family] = (found, now)
        self._ids.move_to_end(family)
        return found

    def __len__(self) -> int:
        return len(self._ids)
