"""Which slot of which tier each block id has, and whether an id still means what it meant.

In:  numbers of blocks of each tier; swaps; ids whose content is given up.
Out: the tier and slot of an id, its generation.
Law: slots are a permutation of ids: every id has one slot and every slot one id. Ids 0 .. device - 1 start on the
     device, then come those of the host, then those of the disk. A generation only grows, when content is given up.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate

from kv_core.errors import CallerError
from kv_core.tiers import Place, Tier


class BlockPool:
    """Ids and slots of one window. Without lower tiers ids are slots and no map is kept."""

    __slots__ = ("_generations", "_slots", "_starts", "has_lower_tiers", "num_blocks", "window")

    def __init__(self, window: int, num_blocks: Sequence[int]) -> None:
        self.window = window
        self.num_blocks = tuple(num_blocks)
        self._starts = (0, *accumulate(self.num_blocks))
        self.has_lower_tiers = sum(self.num_blocks) > self.num_blocks[0]
        self._slots = array("i", range(self._starts[-1])) if self.has_lower_tiers else None
        self._generations: dict[int, int] = {}

    def ids_of(self, tier: Tier) -> range:
        """The ids that start on this tier."""
        return range(self._starts[tier], self._starts[tier + 1])

    def place(self, block_id: int) -> Place:
        """Where the block's bytes are. CallerError for an id that there is not."""
        if not 0 <= block_id < self._starts[-1]:
            raise CallerError(f"no such block: ours=0..{self._starts[-1] - 1}, theirs={block_id}, window={self.window}")
        slot = block_id if self._slots is None else self._slots[block_id]
        tier = sum(slot >= start for start in self._starts[1:-1])
        return Place(self.window, Tier(tier), slot - self._starts[tier])

    def id_at(self, place: Place) -> int:
        """The id of the block that is at a place now. CallerError for a place that there is not. Linear in blocks."""
        if not 0 <= place.slot < self.num_blocks[place.tier]:
            raise CallerError(f"no such place: ours={self.num_blocks[place.tier]}, theirs={place}")
        slot = self._starts[place.tier] + place.slot
        return slot if self._slots is None else self._slots.index(slot)

    def slots(self, block_ids: "array[int]") -> "array[int]":
        """Device slots of ids that are on the device."""
        if self._slots is None:
            return block_ids
        return array("i", [self._slots[block_id] for block_id in block_ids])

    def swap(self, first: int, second: int) -> None:
        """Two ids exchange their slots."""
        assert self._slots is not None, "law: only a pool with lower tiers moves blocks"
        self._slots[first], self._slots[second] = self._slots[second], self._slots[first]

    def generation(self, block_id: int) -> int:
        """How often the content of the block was given up since somebody first asked."""
        self.place(block_id)
        return self._generations.setdefault(block_id, 0)

    def given_up(self, block_ids: Iterable[int]) -> None:
        """These blocks get new content."""
        if self._generations:
            for block_id in block_ids:
                if block_id in self._generations:
                    self._generations[block_id] += 1

    def check(self) -> None:
        """Prove that slots are a permutation."""
        if self._slots is not None:
            assert sorted(self._slots) == list(range(self._starts[-1])), "law: every slot has one id"
