"""Small managers and requests for tests that tell one story each.

In:  the few settings that a story turns on.
Out: `manager(...)` with T = 4, `prompt(...)`, and a clock that is turned by hand.
Law: after every call of `Watched` all laws of the manager are proven.
"""

from typing import Any

from kv_core.config import ManagerConfig, WindowConfig
from kv_core.keys import Scope
from kv_core.manager import KVCacheManager
from kv_core.request import Request
from kv_core.retention import RangeRetention, RetentionConfig

LONGEST = 64


class Clock:
    """Milliseconds that pass when a test says so."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now


class Watched:
    """A manager that proves its laws after every call."""

    def __init__(self, real):
        self.real = real

    def __getattr__(self, name):
        found = getattr(self.real, name)
        if not callable(found):
            return found

        def call(*args, **kwargs):
            try:
                return found(*args, **kwargs)
            finally:
                self.real.check()

        return call


def manager(*blocks, windows=(LONGEST,), clock=None, external=None, **settings):
    """A manager with `blocks` (device, host, disk) in each window; or a list of such tuples, one a window."""
    amounts = [blocks] * len(windows) if blocks and isinstance(blocks[0], int) else blocks
    config = ManagerConfig(
        **{
            "tokens_per_block": 4,
            "windows": tuple(WindowConfig(size, *ours) for size, ours in zip(windows, amounts, strict=True)),
            "max_sequence_length": LONGEST,
        }
        | settings
    )
    return Watched(KVCacheManager(config, clock_ms=clock or Clock(), external=external))


def request(name, tokens, *, lora=None, salt=None, items=(), **more):
    """A request whose prompt is `tokens`."""
    return Request(name, list(tokens), Scope(lora, salt, tuple(items)), **more)


def run(ours, name, tokens, generated=(), **more):
    """Admit, generate, end: what the cache holds of it afterwards is all but the last token. The cached tokens."""
    admission = ours.add(request(name, tokens, **more))
    assert admission is not None
    for token in generated:
        ours.extend(name, [token])
        assert ours.grow(name)
    ours.release(name)
    return admission.num_cached


def found(ours, tokens, **more):
    """How many tokens a new request would find."""
    return ours.probe(request("?", tokens, **more)).num_cached


def keep(priority: int, duration_ms: int | None = None, decode: int = 35) -> RetentionConfig:
    """The wish to keep a whole prompt with this priority."""
    return RetentionConfig((RangeRetention(0, None, priority, duration_ms),), decode)


def payloads(ours: Any) -> list[Any]:
    """What the events say that are new."""
    ours.flush_events()
    return [event.payload for event in ours.take_events()]
