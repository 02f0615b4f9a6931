"""What would be free if some requests ended (core spec 10.1).

In:  the windows and tables of running requests.
Out: `DryRun`, which counts.
Law: only live entries count, each block once, and only if nobody but requests that are supposed to end holds it (core
     spec D15). Nothing is changed; a dry run means nothing any more once the manager has been.
"""

from collections.abc import Callable

from kv_core.errors import CallerError
from kv_core.ids import RequestId
from kv_core.runs import Run
from kv_core.sequence import Sequence, Table
from kv_core.window import Window


class DryRun:
    """See the module; made by the manager."""

    def __init__(self, windows: list[Window], find: Callable[[RequestId], Sequence]) -> None:
        self._windows = windows
        self._find = find
        self._num_free = [window.num_free for window in windows]
        self._released: set[RequestId] = set()
        self._let_go: dict[Run, int] = {}

    def release(self, request_id: RequestId) -> None:
        """Suppose that this request ends. CallerError if unknown or already supposed to end."""
        sequence = self._find(request_id)
        if request_id in self._released:
            raise CallerError(f"this request is supposed to have ended: {request_id!r}")
        self._released.add(request_id)
        for at, (window, table) in enumerate(zip(self._windows, sequence.tables, strict=True)):
            self._num_free[at] += self._freed(window, table)

    def num_free(self, window: int) -> int:
        """Free device blocks of the window then."""
        sizes = [ours.size for ours in self._windows]
        if window not in sizes:
            raise CallerError(f"no such window: ours={sizes}, theirs={window}")
        return self._num_free[sizes.index(window)]

    def _freed(self, window: Window, table: Table) -> int:
        first_private = max(table.published, table.start) + (table.partial is not None)
        private = table.private_ids(first_private, table.stop)
        freed = sum(block_id not in window.pins for block_id in private)
        if table.partial is not None:
            freed += self._let_go_one(table.partial)
        run = table.tail
        while run.stop > table.start:
            freed += self._let_go_one(run)
            assert run.parent is not None, "law: the path begins at a root"
            run = run.parent
        return freed

    def _let_go_one(self, run: Run) -> int:
        self._let_go[run] = self._let_go.get(run, 0) + 1
        return run.count if self._let_go[run] == run.holders else 0
