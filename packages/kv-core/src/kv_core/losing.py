"""Taking blocks out of the tree whose bytes are lost: a file of the disk tier failed.

In:  a window and ids of blocks that no request and no pin holds any more.
Out: the tree without them, and without what nobody can reach any more; `removed` events.
Law: what a copy did not bring is never found. In a window that does not slide all that follows a lost block goes too; a
     sliding window keeps it behind a hole, since it may do without. The blocks are empty and go first on their tiers.
"""

from collections.abc import Iterable

from kv_core.ids import BlockId
from kv_core.inspection import find, isolate
from kv_core.victims import drop_free
from kv_core.window import Window


def lose(window: Window, block_ids: Iterable[BlockId]) -> None:
    """Take these blocks out of the tree; those that are not in it hold nothing that could be found."""
    for block_id in block_ids:
        found = find(window, block_id)
        if found is not None:
            assert not found[0].holders, "law: what is lost is held by nobody"
            drop_free(window, isolate(window, *found))
