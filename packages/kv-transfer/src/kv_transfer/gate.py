"""Who may touch blocks that an engine lent us, until they are taken back.

In:  copies that enter and leave, in the copy thread; one wish to take the blocks back, from any thread.
Out: whether a copy may begin; whether the blocks are free of us.
Law: once `shut` has said True nobody is inside, and nobody ever will be. It does not wait: a copy that hangs keeps its
     own blocks, and nobody else's.
"""

import threading


class Gate:
    """The way to the blocks of one order, or of one reader of an offer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._is_shut = False

    def enter(self) -> bool:
        """A copy begins; False if the blocks were taken back. Who is let in leaves."""
        with self._lock:
            if self._is_shut:
                return False
            self._num_inside += 1
            return True

    def leave(self) -> None:
        """A copy has ended: nothing that it queued on any stream is still to run."""
        with self._lock:
            assert self._num_inside > 0, "law: who leaves has entered"
            self._num_inside -= 1

    def shut(self) -> bool:
        """Lets nobody in from now on; True if nobody is inside either. Idempotent."""
        with self._lock:
            self._is_shut = True
            return self._num_inside == 0
