"""The faults a test orders in a running engine (`kv_engine_adapter.hooks`), and what an engine says it has open.

In:  the directory an engine was given as `test_hooks_dir`; an engine's metrics.
Out: a context for each fault, over when it is left; the gauges that must come back to 0.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kv_engine_adapter.cli.engines import Engine

GAUGES = (
    "kvferry:sessions",
    "kvferry:offers",
    "kvferry:loads_running",
    "kvferry:staging_leases",
    "kvferry:staging_quarantined",
)
KEY, VALUE = 0, 1
BYTES_RECEIVED = "kvferry:bytes_received_total"
BYTES_SENT = "kvferry:bytes_sent_total"
USAGE = "vllm:kv_cache_usage_perc"


@contextmanager
def held_writes(hooks: Path) -> Iterator[Path]:
    """While this lasts, the engine holds the writes it has decided on; afterwards they go out, however late."""
    order = hooks / "hold-writes"
    for old in hooks.glob("held-*"):
        old.unlink()
    order.write_text("")
    try:
        yield order
    finally:
        order.unlink(missing_ok=True)


def num_held(hooks: Path) -> int:
    """Sessions of which a write has come as far as the hook since it began to hold them."""
    return len(list(hooks.glob("held-*")))


@contextmanager
def corrupt_block(hooks: Path, block: int, plane: int, layer: int | None = None) -> Iterator[None]:
    """While this lasts, what the engine receives for this block of a request is spoilt after it was verified.

    In all layers, or in one.
    """
    order = hooks / "corrupt.json"
    fresh = hooks / "corrupt.json.new"
    fresh.write_text(json.dumps({"block": block, "plane": plane} | ({} if layer is None else {"layer": layer})))
    fresh.rename(order)
    try:
        yield
    finally:
        order.unlink(missing_ok=True)


@contextmanager
def lost_messages(hooks: Path, share: float) -> Iterator[None]:
    """While this lasts, the engine's ranks lose this share of what they say to peers."""
    order, fresh = hooks / "lose.json", hooks / "lose.json.new"
    fresh.write_text(json.dumps({"share": share}))
    fresh.rename(order)
    try:
        yield
    finally:
        order.unlink(missing_ok=True)


def open_things(engine: Engine) -> dict[str, float]:
    """Our gauges that are not 0."""
    metrics = engine.metrics()
    return {name: metrics[name] for name in GAUGES if metrics.get(name)}


def bytes_received(engine: Engine) -> float:
    """KV bytes the engine has received from peers since it started."""
    return engine.metrics().get(BYTES_RECEIVED, 0.0)


def bytes_sent(engine: Engine) -> float:
    """KV bytes the engine has written to peers since it started."""
    return engine.metrics().get(BYTES_SENT, 0.0)


def complaints(engine: Engine, num_lines: int = 8) -> list[str]:
    """The last lines of its log that tell of something wrong."""
    log = engine.program.log.read_text(errors="replace")
    return [line for line in log.splitlines() if re.search("WARNING|ERROR|was not loaded", line)][-num_lines:]


def reason_in_log(engine: Engine, reason: str) -> bool:
    """Whether the engine has told its operator why it could not load a request."""
    log = engine.program.log.read_text(errors="replace")
    return any("was not loaded" in line and re.search(reason, line) for line in log.splitlines())


def usage(engine: Engine) -> float:
    """The share of the engine's blocks that are taken."""
    return engine.metrics()[USAGE]
