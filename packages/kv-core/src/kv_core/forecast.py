"""Forecasts for a request of a manager: its present state, put into the formulas of `kv_core.scheduling`.

In:  a manager, a request of it or one not yet added, what the request asks for, its phase.
Out: blocks that it needs next or until it ends.
Law: a question; nothing in the manager changes. Detached blocks do not count as there, and cached blocks are credited
     only while somebody holds them (core spec D26, D60).
"""

from kv_core.errors import CallerError
from kv_core.ids import RequestId
from kv_core.manager import KVCacheManager
from kv_core.request import Request
from kv_core.scheduling import Limits, Phase, Progress


def limits(manager: KVCacheManager, window: int, temporary_tokens: int = 0) -> Limits:
    """The limits of one window of the manager. CallerError if it has no such window."""
    config = manager.config
    if window not in [one.window for one in config.windows]:
        raise CallerError(f"no such window: ours={[one.window for one in config.windows]}, theirs={window}")
    longest = max(window, config.max_sequence_length)
    return Limits(window, longest, config.tokens_per_block, temporary_tokens)


def progress(manager: KVCacheManager, request_id: RequestId, window: int, phase: Phase) -> Progress:
    """How far a request is that was added."""
    live = sum(block_id is not None for block_id in manager.block_ids(request_id, window))
    return Progress(phase, manager.num_tokens(request_id), live)


def prospect(manager: KVCacheManager, request: Request, window: int, phase: Phase = Phase.CONTEXT) -> Progress:
    """The same for a request not yet added, with credit for full cached blocks of its prompt that others hold."""
    if request.tokens is None or not manager.config.reuse:
        return Progress(phase)
    found = manager.lookup(request, window)
    num_full = min(found.num_tokens, request.length - 1) // manager.config.tokens_per_block
    held = (block_id is not None and manager.inspect(window, block_id).held for block_id in found.block_ids[:num_full])
    return Progress(phase, num_held_hits=sum(held))
