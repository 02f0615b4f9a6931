"""Hands chats over between two real vLLM servers and shows what it cost.

In:  nothing; the tiny model is made if it is missing.
Out: progress, the answers as they stream, a table; exit code 0 if all answers equal a single engine's.

Usage: .venv/bin/python tools/demo/demo.py [--connector NixlConnector] [--model DIR] [--logs DIR]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from model.make_tiny import make_tiny

from kv_engine_adapter.cli import demo

if __name__ == "__main__":
    sys.exit(demo.main(model=make_tiny()))
