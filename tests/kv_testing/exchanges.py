"""One hand-over between two instances of worlds, judged byte by byte.

In:  a small model in any shape; two sides; the tokens that travel, and between which groups.
Out: nothing: what is lost, misplaced or left open is an assertion.
"""

import pytest

from kv_core.spans import Span
from kv_testing.layouts import make_state
from kv_testing.worlds import ALL, NUM_TOKENS, Side
from kv_transfer.orders import Received
from kv_transfer.passages import Passages
from kv_transfer.plan.cache_state import LATENT, CacheState, ParallelLayout
from kv_transfer.plan.plan import widened
from kv_transfer.send_session import SendSession


def small_state(
    tp: int = 1,
    stages: tuple[int, ...] = (4,),
    heads: int = 4,
    tokens_per_block: int = 4,
    attention: str = "full",
    windows: tuple[int, ...] = (),
    fields: dict[str, object] | None = None,
    **cut: object,
) -> CacheState:
    """A float32 model of small heads, cut as told; `cut` is for `ParallelLayout.even`, `fields` for the state."""
    usual = {
        "fingerprint": "model",
        "attention": attention,
        "dtype": "float32",
        "head_size": 4,
        "num_layers": sum(stages),
        "num_kv_heads": heads,
        "num_planes": 1 if attention == LATENT else 2,
        "tokens_per_block": tokens_per_block,
        "windows": windows,
        "parallel": ParallelLayout.even(tp, list(stages), heads, **cut),  # type: ignore[arg-type]
    }
    return make_state(**(usual | (fields or {})))


def hand_over(
    p: Side,
    d: Side,
    tokens: Span = ALL,
    from_group: int = 0,
    to_group: int = 0,
    num_tokens: int = NUM_TOKENS,
    name: str = "",
) -> list[Received]:
    """One request; every byte is where it belongs, and nothing is left open. Answers what each rank reported.

    `name` tells the requests of several hand-overs between the same sides apart.
    """
    prefill, decode = f"p0{name}", f"d0{name}"
    transfer = p.offer(prefill, num_tokens=num_tokens, group=from_group)
    d.order(p, transfer, decode, tokens=tokens, from_group=from_group, to_group=to_group)
    received = d.outcomes(decode, others=[p])
    assert all(each.ok for each in received), received
    # Of opaque tiles the whole moves, as far as it is filled.
    moved = widened(tokens, d.world.state)
    assert d.misplaced(Span(moved.start, min(moved.stop, num_tokens))) == 0
    d.release(p, transfer, decode)
    d.check_clean()
    p.check_clean()
    return received


def spoil_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of every chunk changes on its way, after its checksum was taken."""
    write = Passages._write

    def spoilt(self: Passages, session: SendSession, seq: int) -> None:
        session.moves.held[seq].lease.slice.tensor[5] ^= 1
        write(self, session, seq)

    monkeypatch.setattr(Passages, "_write", spoilt)
