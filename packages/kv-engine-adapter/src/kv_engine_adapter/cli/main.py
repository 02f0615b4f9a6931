"""The `kvferry` command: one word that says what to do, then that command's own arguments.

In:  the command line.
Out: the exit status of the command.
Law: a command's module is loaded only when it runs, so that none needs what another one does.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

COMMANDS: Final = {
    "replay": "replay a trace through the cache manager: hits for each capacity and eviction order",
    "explain": "which ranks of one engine send what to which ranks of another",
    "doctor": "whether an engine can work on this machine, and what to do if not",
    "keygen": "make the key pair that the engines of a deployment share",
    "bench": "measure the data paths on this machine (`kvferry bench paths`)",
    "demo": "hand chats over between two real vLLM servers (needs vLLM and a model)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: that of the command; 2 for a command that there is not."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if words[0] not in COMMANDS:
        print(f"kvferry: no such command: {words[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    status: int = import_module(f"kv_engine_adapter.cli.{words[0]}").main(words[1:])
    return status


def _usage() -> str:
    lines = "\n".join(f"  {name:8} {text}" for name, text in COMMANDS.items())
    return f"usage: kvferry COMMAND ...\n\n{lines}\n\nkvferry COMMAND --help tells its arguments."
