"""What a store has on the disk while it is open: its directory, the files of its namespace, and their index.

In:  StoreConfig, the Namespace.
Out: Holdings; CallerError for a directory that is not ours alone, OSError for one that cannot be used.
Law: directories have mode 0700 and files 0600. What processes that died were writing is removed at the start. What
     somebody removes while it is open (a cleaner of old files) is made again when a write has missed it.

    <directory>/lock, usage                       see `quota`
               /kv-blocks-<pid>-<random>/lock     held as long as the process lives
                                        /<n>.part a file before it has its name
               /v1-...                            a namespace, see `names`
"""

import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from kv_core.errors import CallerError
from kv_core.keys import BlockKey
from kv_transfer.prefix_store.config import StoreConfig
from kv_transfer.prefix_store.index import Index
from kv_transfer.prefix_store.misses import Counts, Miss, Missed
from kv_transfer.prefix_store.names import FORMAT_VERSION, NAMESPACE, Namespace, key_folder
from kv_transfer.prefix_store.quota import Quota
from kv_transfer.prefix_store.shelf import Shelf
from kv_transfer.process_directory import ProcessDirectory

_MAX_BESIDE: Final = 16


class Holdings:
    """Until `close`."""

    def __init__(self, config: StoreConfig, namespace: Namespace, counts: Counts, clock: Callable[[], float]) -> None:
        self._directory = directory = config.directory
        _make_private(directory)
        self._restoring = threading.Lock()
        self._namespace = namespace
        self._own = ProcessDirectory(directory)

        def on_evicted(num_bytes: int) -> None:
            counts.add("evicted_keys")
            counts.add("evicted_bytes", num_bytes)

        quota = Quota(directory, config.quota_bytes, config.lock_timeout_s, clock, on_evicted)
        try:
            self.shelf = Shelf(directory / namespace.folder, self._own, quota, sync=config.sync)
            self.index = Index(self.shelf.namespace, config.max_indexed)
            # Whoever has the lock now will leave a good number.
            with suppress(Missed):
                quota.settle()
            self._beside = sorted(
                path for path in directory.iterdir() if NAMESPACE.fullmatch(path.name) and path.name != namespace.folder
            )[:_MAX_BESIDE]
        except OSError:
            self._own.close()
            raise

    def is_restored(self, error: OSError | Missed) -> bool:
        """After a write that found a directory gone: whether all of them are there again."""
        if not isinstance(error, FileNotFoundError):
            return False
        with self._restoring, suppress(OSError, CallerError):
            _make_private(self._directory)
            if not self._own.path.exists():
                self._own.close()
                self._own = ProcessDirectory(self._directory)
            self.shelf.move(self._own)
            return True
        return False

    def why_absent(self, key: BlockKey) -> Miss:
        """Whether a key that we do not have is there for others."""
        for path in self._beside:
            found = NAMESPACE.fullmatch(path.name)
            assert found is not None, "law: only namespaces are beside ours"
            if not os.path.lexists(path / key_folder(key)):
                continue
            if int(found[1]) != FORMAT_VERSION:
                return Miss.OTHER_FORMAT
            return Miss.OTHER_HASH_RULE if found[2] != self._namespace.rule.hex()[:16] else Miss.OTHER_MODEL
        return Miss.ABSENT

    def close(self) -> None:
        """Records stay. Idempotent."""
        self._own.close()


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    seen = directory.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        owner = f"owner={seen.st_uid}, ours={os.geteuid()}, mode={stat.S_IMODE(seen.st_mode):o}, wanted=700"
        raise CallerError(f"the store's directory is not ours alone: {directory}, {owner}")
