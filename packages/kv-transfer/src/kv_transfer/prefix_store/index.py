"""Which keys a namespace holds, as remembered: a bounded picture of a directory that others change too.

In:  the directory; what this process wrote, read in vain or looked for.
Out: the names of a key's files.
Law: the directory is the truth. What is remembered may be gone, and a read then says so; what is not remembered, or
     does not suffice, is looked for. At most `most` keys are remembered, the latest used ones.
"""

import heapq
import threading
from collections import OrderedDict
from pathlib import Path

from kv_core.keys import BlockKey
from kv_transfer.prefix_store.boxes import Boxes, cover
from kv_transfer.prefix_store.names import RecordName, key_folder, records_in, scan


class Index:
    """Of one namespace; may be used by several threads."""

    def __init__(self, namespace: Path, most: int) -> None:
        """Reads the names that are there."""
        self._namespace = namespace
        self._most = most
        self._lock = threading.Lock()
        self._names: OrderedDict[BlockKey, tuple[RecordName, ...]] = OrderedDict()
        by_use = ((max(found.used_at for found in files), files) for files in scan(namespace))
        latest = heapq.nlargest(most, by_use, key=lambda used: used[0])
        for _, files in reversed(latest):
            self._names[files[0].key] = tuple(found.name for found in files)

    def __len__(self) -> int:
        return len(self._names)

    def names_of(self, key: BlockKey, boxes: Boxes) -> tuple[RecordName, ...]:
        """Files of the key that hold the boxes; nothing if there are none. OSError if that cannot be seen."""
        with self._lock:
            names = self._names.get(key, ())
            if names:
                self._names.move_to_end(key)
        if not covers(names, boxes):
            names = tuple(records_in(self._namespace / key_folder(key)))
            self._remember(key, names)
        return names if covers(names, boxes) else ()

    def forget(self, key: BlockKey) -> None:
        """Look again when the key is asked for."""
        self._remember(key, ())

    def _remember(self, key: BlockKey, names: tuple[RecordName, ...]) -> None:
        with self._lock:
            self._names.pop(key, None)
            if names:
                self._names[key] = names
            while len(self._names) > self._most:
                self._names.popitem(last=False)


def covers(names: tuple[RecordName, ...], boxes: Boxes) -> bool:
    """Whether these files together hold the boxes."""
    return cover(boxes, (name.box for name in names)) is not None
