"""What a test does to a real engine with tiers, from inside: other weights, resets, a disk that fails, a log kept.

In:  vLLM's `LLM` in this process, at rest but where said otherwise.
Out: what a caller of `TierProcess.do` wants to know.
Law: what is broken here is mended by the function named with it.
"""

import errno
import logging
import os
from collections.abc import Sequence
from typing import Any

from kv_testing.answers import Prompt
from kv_testing.tier_storm import Asked, Storm
from kv_transfer.file_mover import FileCalls, PlainFiles

OUR_LOGS = ("kv_core", "kv_transfer", "kv_engine_adapter", "vllm")


class _Heard(logging.Handler):
    """Keeps what is logged as an error, or with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.lines.append(self.format(record))


_HEARD = _Heard()


def errors(engine: Any) -> list[str]:
    """What has been logged as an error since the first call."""
    for name in OUR_LOGS:
        if _HEARD not in (log := logging.getLogger(name)).handlers:
            log.addHandler(_HEARD)
    return list(_HEARD.lines)


# Weights.


def turn_weights(engine: Any) -> None:
    """Other weights under an unchanged checkpoint; turned twice they are as before."""
    engine.apply_model(_turned)


def _turned(model: Any) -> None:
    """Norms, since a CPU computes with copies of its matrices."""
    found = [weights for name, weights in model.named_parameters() if "input_layernorm" in name]
    assert found, [name for name, _ in model.named_parameters()]
    for weights in found:
        weights.data.neg_()


def reset(engine: Any, *, running: bool = False) -> bool:
    """Reset everything, once whatever is open has ended; whether vLLM says that it has."""
    Storm(engine, 0).settle()
    return bool(engine.reset_prefix_cache(reset_running_requests=running, reset_connector=True))


def forget_device(engine: Any) -> bool:
    """Reset the engine's own prefix cache alone."""
    Storm(engine, 0).settle()
    return bool(engine.reset_prefix_cache())


def reset_while_open(engine: Any, prompts: Sequence[Prompt]) -> dict[str, int]:
    """Other weights, and a reset while one request computes, one loads and one is saved, which all go on.

    The first prompt is one that the tiers have, the second is saved, the third goes on.
    """
    storm = Storm(engine, 0, pauses_s=(0.5,))
    with storm.slow_copies():
        storm.ask(prompts, Asked(2, 100, leaves=False))
        storm.ask(prompts, Asked(1, 1, leaves=False))
        while not len(storm.tiers._leases):
            storm.step()
        storm.ask(prompts, Asked(0, 5, leaves=False))
        while not storm.tiers.prefixes._loading:
            storm.step()
        open_now = {"saving": len(storm.tiers._leases), "loading": len(storm.tiers.prefixes._loading)}
        turn_weights(engine)
        is_reset = engine.reset_prefix_cache(reset_connector=True)
        while storm.open:
            storm.step()
    storm.settle()
    return {**open_now, "reset": int(is_reset), "resets": storm.tiers.prefixes.counts["resets"]}


# The disk.


def break_disk(engine: Any, what: str) -> None:
    """From now on files cannot be read ("read"), or written ("write"), until `mend_disk`."""

    def fail(*_: object) -> int:
        raise OSError(*({"read": (errno.EIO, "broken"), "write": (errno.ENOSPC, "full")}[what]))

    calls = FileCalls(read_into=fail) if what == "read" else FileCalls(write=fail)
    _files(engine)._mover = PlainFiles(calls)


def mend_disk(engine: Any) -> None:
    """The end of `break_disk`."""
    _files(engine)._mover = PlainFiles()


def secret_of(engine: Any) -> str:
    """What names of records begin with since the last reset."""
    return str(Storm(engine, 0).tiers.prefixes._disk._secret)


def forget_host(engine: Any) -> None:
    """Let the host tier have room for others; the disk keeps what it has."""
    storm = Storm(engine, 0)
    storm.settle()
    storm.tiers.prefixes._slots.restart()
    assert engine.reset_prefix_cache()


def at_rest(engine: Any) -> dict[str, int]:
    """What the tiers and their store have counted, once nothing is open."""
    storm = Storm(engine, 0)
    storm.settle()
    return {**storm.tiers.prefixes.counts, **_worker()._tier_worker.disk_counts(), "process": os.getpid()}


def _files(engine: Any) -> Any:
    Storm(engine, 0).settle()
    return _worker()._tier_worker._store._files


def _worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()
