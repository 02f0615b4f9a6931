"""Our threads leave the core that an engine's thread is bound to, and leave that thread where it is."""

import os
import threading

import pytest

from kv_transfer.threads import leave_pinned_core

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no such setting on this system")


def test_a_thread_started_on_a_bound_core_may_run_anywhere():
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    try:
        seen = {}

        def ours():
            seen["before"] = os.sched_getaffinity(0)
            leave_pinned_core()
            seen["after"] = os.sched_getaffinity(0)

        thread = threading.Thread(target=ours)
        thread.start()
        thread.join()
        assert seen == {"before": {min(everywhere)}, "after": everywhere}
        assert os.sched_getaffinity(0) == {min(everywhere)}
    finally:
        os.sched_setaffinity(0, everywhere)
