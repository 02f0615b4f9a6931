"""`kvferry replay`: a trace through the cache manager, with progress and a picture.

In:  the arguments of `python -m kv_core.replay`, and `--plot FILE.svg`.
Out: its table and CSV file; a line of progress on a terminal; hit rate over capacity, one line for each order.
Law: the numbers are those of `kv_core.replay`; nothing is computed here.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from kv_core.errors import CallerError
from kv_core.replay import Outcome, add_arguments, load, parse_options, replay, report
from kv_engine_adapter.cli.chart import Curve, chart

BAR = 30


class Bar:
    """Progress on a terminal: one line that changes. Nothing elsewhere."""

    def __init__(self, out: TextIO, num_settings: int) -> None:
        self._out = out if out.isatty() else None
        self._num_settings = num_settings
        self._seen: list[str] = []

    def __call__(self, setting: str, done: int, total: int) -> None:
        if self._out is None:
            return
        if setting not in self._seen:
            self._seen.append(setting)
        part = (len(self._seen) - 1 + done / max(total, 1)) / self._num_settings
        filled = round(part * BAR)
        self._out.write(f"\r\x1b[K[{'#' * filled}{'.' * (BAR - filled)}] {part:4.0%}  {setting[:70]}")
        if part >= 1:
            self._out.write("\r\x1b[K")
        self._out.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for arguments or a trace that cannot be used."""
    parser = argparse.ArgumentParser(prog="kvferry replay", description="Replay a trace through the cache manager.")
    add_arguments(parser)
    parser.add_argument("--plot", type=Path, help="write a picture (SVG): hit rate over device blocks")
    chosen = parser.parse_args(arguments)
    try:
        options = parse_options(chosen)
        bar = Bar(sys.stderr, len(options.settings))
        outcomes = list(replay(load(options), options.settings, retention=options.retention, progress=bar))
        report(outcomes, options, sys.stdout)
        if chosen.plot is not None:
            chosen.plot.write_text(picture(outcomes, options.trace.name))
    except (CallerError, OSError) as error:
        print(f"kvferry replay: {error}", file=sys.stderr)
        return 2
    return 0


def picture(outcomes: Sequence[Outcome], trace: str) -> str:
    """Hit rate over device capacity, one curve for each order and lower tiers; the ceiling as a line."""
    points: dict[str, list[tuple[float, float]]] = {}
    for one in outcomes:
        points.setdefault(_name(one), []).append((one.setting.device, 100 * one.hit_rate))
    curves = [Curve(name, tuple(sorted(found))) for name, found in points.items()]
    ceiling = 100 * outcomes[0].ceiling_rate if outcomes else 0.0
    return chart(f"Prefix hits, {trace}", "device blocks", "hit rate, %", curves, ("no bound", ceiling))


def _name(one: Outcome) -> str:
    below = [f"{blocks} {tier}" for tier, blocks in (("host", one.setting.host), ("disk", one.setting.disk)) if blocks]
    return " + ".join([one.setting.order, *below])
