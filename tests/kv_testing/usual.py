"""What most worlds have in common: a small model, a prompt, quick settings."""

import secrets
from collections.abc import Sequence

from kv_core.ids import TransferId
from kv_core.spans import Span
from kv_testing.layouts import make_state
from kv_transfer.config import TransferConfig
from kv_transfer.plan.cache_state import BlockLayout, CacheState, ParallelLayout

NUM_TOKENS = 40
ALL = Span(0, NUM_TOKENS)
PROMPT = b"k" * 32
SOON_S = 20.0
"""Far below the deadline of a load (40 s), far above what anything takes: machines of tests stall."""

FAST = TransferConfig(
    request_deadline_s=40.0,
    lease_s=60.0,
    peer_timeout_s=0.3,
    nudge_s=0.2,
    nudge_limit_s=0.5,
    chunk_bytes=1024,
    send_arena_bytes=64 * 4096,
    receive_arena_bytes=64 * 4096,
    stall_s=120.0,
)
"""Short pauses, so that tests of repetition are quick; small chunks, so that a transfer has many. No thread is taken
for one that hangs because the machine has no time for it."""


def state_of(
    tp: int = 1, stages: Sequence[int] = (4,), tokens_per_block: int = 4, order: str = "head_major"
) -> CacheState:
    """A small float32 model of 4 layers and 4 KV heads, cut over `tp` tensor ranks and the given stages."""
    return make_state(
        fingerprint="model",
        dtype="float32",
        head_size=4,
        tokens_per_block=tokens_per_block,
        layout=BlockLayout(order),  # type: ignore[arg-type]
        parallel=ParallelLayout.even(tp, list(stages), 4),
    )


def fresh_id() -> TransferId:
    """A transfer id that nobody has used."""
    return TransferId(secrets.token_hex(16))
