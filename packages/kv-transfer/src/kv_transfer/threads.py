"""Where our own threads may run.

Law: only the calling thread is concerned; the engine's threads stay where the engine put them.
"""

import os


def leave_pinned_core() -> None:
    """Let the calling thread run on every core the system allows.

    Why: an engine pins its compute threads, and a thread started by one of them inherits that. vLLM's CPU workers bind
    their main thread to a core on which it then spins for the next step; a reactor that may run only there waits for
    its turn at every message. Does nothing where the system has no such setting.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    except OSError:
        # Not allowed here: a slower thread is no reason to fail.
        return
