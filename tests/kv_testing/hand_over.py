"""One good hand-over between two sides, from offer to release, after which nothing is open."""

from kv_testing.worlds import Side


def hand_over(p: Side, d: Side, name: str = "r") -> None:
    """Of the prompt that all sides hold, to its proof in every element."""
    transfer = p.offer(name)
    d.order(p, transfer, name)
    received = d.outcome(name, others=[p])
    assert received.ok, received.reason
    assert d.misplaced() == 0
    d.release(p, transfer, name)
    d.check_clean()
    p.check_clean()
