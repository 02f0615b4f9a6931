"""Which host this is: what shared memory and mapped GPU memory reach, and nothing beyond.

In:  nothing; the kernel's boot id.
Out: a name that all processes of a running host have in common.
"""

from pathlib import Path
from typing import Final

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """The same for all processes of a running host, containers of it included."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else "unknown"
