"""Parts of a model's layers and KV heads, and which files together hold a part.

In:  the box wanted, and the boxes of some files.
Out: the pieces to take from each file; None if something is held by none.
Law: the pieces cover the wanted box and do not overlap, whatever the cut of whoever wrote the files.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kv_core.spans import Span


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Some neighbouring global layers and global KV heads."""

    layers: Span
    heads: Span

    def __bool__(self) -> bool:
        return bool(self.layers) and bool(self.heads)

    def __len__(self) -> int:
        return len(self.layers) * len(self.heads)

    def __and__(self, other: "Box") -> "Box":
        return Box(self.layers & other.layers, self.heads & other.heads)

    def without(self, other: "Box") -> Iterator["Box"]:
        """What is left of this box when the other one is taken out: above, below, and on both sides."""
        common = self & other
        if not common:
            yield self
            return
        rest = (
            Box(Span(self.layers.start, common.layers.start), self.heads),
            Box(Span(common.layers.stop, self.layers.stop), self.heads),
            Box(common.layers, Span(self.heads.start, common.heads.start)),
            Box(common.layers, Span(common.heads.stop, self.heads.stop)),
        )
        yield from (box for box in rest if box)


Boxes = tuple[Box, ...]
"""Some that do not overlap."""


def cover(wanted: Boxes, held: Iterable[Box]) -> dict[Box, tuple[Box, ...]] | None:
    """For each held box that is needed, what to take from it; None if the wanted boxes are not held as a whole."""
    missing, found = [*wanted], {}
    # Why by size: few large files are read rather than many small ones.
    for box in sorted(held, key=lambda box: (-sum(len(box & part) for part in wanted), len(box), box)):
        taken = tuple(common for part in missing if (common := part & box))
        if taken:
            found[box] = taken
            missing = [left for part in missing for left in part.without(box)]
    return None if missing else found
