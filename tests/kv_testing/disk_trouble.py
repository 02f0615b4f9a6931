"""What goes wrong with the disk of the tiers: files that are harmed by somebody else, calls that fail or hang.

In:  the directory that engines share, or the hooks of one engine; dice.
Out: files harmed; a context in which an engine's calls fail.
Law: only what the tiers have published is harmed, as a bad disk or a careless person would.
"""

import errno
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random

KEY_DIGITS = 64
MANY = 24
"""How many files are harmed at once, at most."""

FAULTS: Mapping[str, Mapping[str, float]] = {
    "full": {"errno": errno.ENOSPC},
    "fails": {"errno": errno.EIO, "read_errno": errno.EIO},
    "hangs": {"hang_s": 0.5},
}
"""What each call may come to (`kv_engine_adapter.hooks`)."""


def _flip(path: Path, dice: Random) -> None:
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, dice: Random) -> None:
    with path.open("r+b") as file:
        file.truncate(dice.randrange(path.stat().st_size))


def _swap(path: Path, dice: Random) -> None:
    """A folder where a file was: it cannot be read."""
    del dice
    path.unlink()
    path.mkdir()


HARMS: tuple[Callable[[Path, Random], object], ...] = (_flip, _cut, _swap, lambda path, _: path.unlink())


def records(directory: Path) -> list[Path]:
    """The files of records that are there now."""
    return [path for path in directory.rglob("*") if len(path.parent.name) == KEY_DIGITS and path.is_file()]


def num_bytes(directory: Path) -> int:
    """What all files in the directory take, published or not."""
    sizes = 0
    for path in directory.rglob("*"):
        try:
            sizes += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # evicted meanwhile
    return sizes


def harm(directory: Path, dice: Random) -> int:
    """Harm some files, each in its own way; how many."""
    found = sorted(records(directory))
    chosen = dice.sample(found, min(len(found), dice.randint(1, MANY)))
    return sum(_harmed(path, dice) for path in chosen)


def lose_all(directory: Path) -> None:
    """Somebody needs room, and clears all records away under engines that run."""
    for key in {path.parent for path in records(directory)}:
        shutil.rmtree(key.parent, ignore_errors=True)


@contextmanager
def faulty_disk(hooks: Path, fault: Mapping[str, float]) -> Iterator[None]:
    """While this lasts, the engine's calls to its disk come to this."""
    order, fresh = hooks / "files.json", hooks / "files.json.new"
    fresh.write_text(json.dumps(dict(fault)))
    fresh.rename(order)
    try:
        yield
    finally:
        order.unlink(missing_ok=True)


def _harmed(path: Path, dice: Random) -> bool:
    try:
        dice.choice(HARMS)(path, dice)
    except OSError:
        return False  # evicted meanwhile
    return True
