"""Shows how far servers have come in their start: one line that changes on a terminal, a line a change elsewhere."""

from typing import TextIO

from kv_engine_adapter.cli.engines import StartUp


class Progress:
    """A watcher for `wait_ready`."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown: dict[str, str] = {}

    def __call__(self, now: StartUp) -> None:
        stages = dict(now.stages)
        if self._out.isatty():
            line = "  ".join(f"{name}: {stage}" for name, stage in stages.items())
            done = all(stage == "ready" for stage in stages.values())
            self._out.write(f"\r\x1b[K[{now.seconds:4.0f} s] {line[:100]}" + ("\n" if done else ""))
        else:
            for name, stage in stages.items():
                if self._shown.get(name) != stage:
                    self._out.write(f"[{now.seconds:4.0f} s] {name}: {stage}\n")
        self._shown = stages
        self._out.flush()
