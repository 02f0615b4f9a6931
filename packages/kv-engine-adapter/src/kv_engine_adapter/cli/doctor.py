"""`kvferry doctor`: whether an engine with FerryConnector can work here, and what to do if not.

In:  the settings an engine would get, how many ranks it has.
Out: one line a finding; exit status 1 if any of them keeps an engine from starting or from handing over.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kv_core.errors import CallerError
from kv_engine_adapter.cli.arguments import count
from kv_engine_adapter.cli.findings import Finding, Level, findings
from kv_engine_adapter.cli.host import this_host
from kv_engine_adapter.config import FerryConfig, ferry_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 for a BAD finding; 2 for settings that the connector would refuse."""
    parser = argparse.ArgumentParser(
        prog="kvferry doctor", description="Check that an engine with FerryConnector can work on this machine."
    )
    parser.add_argument("--config", default="{}", help="kv_connector_extra_config as JSON, as the engine gets it")
    parser.add_argument(
        "--ranks", type=count, default=1, help="ranks of the engine (TP * PP), one port each (default 1)"
    )
    parser.add_argument("--disk", type=Path, help="a directory for cache files")
    parser.add_argument("--json", action="store_true", help="one JSON array instead of lines")
    chosen = parser.parse_args(arguments)
    try:
        config = _config_of(chosen.config)
    except CallerError as error:
        print(f"kvferry doctor: {error}", file=sys.stderr)
        return 2
    first = config.transfer.port
    ports = range(first, first + 1 + chosen.ranks) if first else ()
    found = findings(this_host(config.transfer.bind_host, ports, chosen.disk), config)
    print(_as_json(found) if chosen.json else _as_lines(found))
    return int(any(each.level is Level.BAD for each in found))


def _config_of(text: str) -> FerryConfig:
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise CallerError(f"--config is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise CallerError(f"--config is not a JSON object: got={text!r}")
    return ferry_config(settings)


def _as_lines(found: Sequence[Finding]) -> str:
    width = max(len(each.subject) for each in found)
    lines = [f"{each.level.value:4}  {each.subject:{width}}  {each.found}" for each in found]
    advice = [f"\n      {'':{width}}  -> {each.advice}" if each.advice else "" for each in found]
    bad, hints = (sum(each.level is level for each in found) for level in (Level.BAD, Level.HINT))
    verdict = f"{bad} things must be changed, {hints} could be better" if bad or hints else "all is well"
    return "\n".join([*(line + more for line, more in zip(lines, advice, strict=True)), "", verdict])


def _as_json(found: Sequence[Finding]) -> str:
    return json.dumps([asdict(each) | {"level": each.level.value} for each in found])
