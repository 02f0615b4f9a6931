"""`kvferry keygen`: the key pair that all engines of a deployment share.

In:  where to write it.
Out: a file for the setting `curve_key`, readable by its owner only.
Law: an existing file is never overwritten.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kv_core.errors import CallerError
from kv_transfer.keys import make_keys


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 if the file cannot be written."""
    parser = argparse.ArgumentParser(prog="kvferry keygen", description="Make the key pair of a deployment.")
    parser.add_argument("file", type=Path, help="copied to every host, mode 600, and named by the setting curve_key")
    path = parser.parse_args(arguments).file
    try:
        make_keys(path)
    except (CallerError, OSError) as error:
        print(f"kvferry keygen: {error}", file=sys.stderr)
        return 2
    print(f'{path}: copy it to every host, and give each engine "curve_key": "<its path>"')
    return 0
