"""Who hears what an engine's tiers tell, and believes nothing: names are made again from parents and tokens.

In:  the events of `PrefixTiers`, in order.
Out: the names of blocks that host memory and the disk hold; `AssertionError` for what contradicts itself.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256

from kv_core.events import Stored
from kv_core.keys import BlockKey
from kv_engine_adapter.tier import PrefixTiers
from kv_engine_adapter.tier_events import BlockName, BlocksStored, Medium, TierEvent


def named(tokens: Sequence[int], salt: str | None, size: int, parent: bytes | None = None) -> list[BlockName]:
    """What an engine calls the whole blocks of these tokens: chained hashes, in which the salt is the first block's."""
    names: list[BlockName] = []
    for start in range(0, len(tokens) // size * size, size):
        extra = None if salt is None or parent is not None else (salt,)
        block = ",".join(map(str, tokens[start : start + size]))
        parent = sha256(f"{parent!r} {extra!r} {block}".encode()).digest()
        names.append(BlockName(parent, extra))
    return names


class Listener:
    """A reader of events from the first on."""

    def __init__(self, tokens_per_block: int) -> None:
        self.size = tokens_per_block
        self.held: dict[Medium, dict[bytes, None]] = {medium: {} for medium in Medium}

    def hear(self, events: Iterable[TierEvent]) -> None:
        for event in events:
            held = self.held[event.medium]
            if isinstance(event, BlocksStored):
                self._stored(event, held)
                continue
            for each in event.hashes:
                assert each in held, "law: what is removed was told"
                del held[each]

    def _stored(self, event: BlocksStored, held: dict[bytes, None]) -> None:
        assert len(event.tokens) == len(event.names) * self.size, "law: whole blocks, with all their tokens"
        assert event.parent is None or event.medium is Medium.DISK or event.parent in held, "law: parents come first"
        salt = event.names[0].extra_keys[0] if event.names[0].extra_keys else None
        assert salt is None or isinstance(salt, str)
        assert named(event.tokens, salt, self.size, event.parent) == list(event.names)
        num_known = sum(name.hash in held for name in event.names)
        is_again = event.medium is Medium.HOST and event.parent is None and num_known == len(event.names)
        assert is_again or not num_known, "law: what is there is told again only from its beginning"
        held.update((name.hash, None) for name in event.names)


def names_in_host(tiers: PrefixTiers, size: int) -> set[bytes]:
    """The names of all whole blocks that the host tier would find."""
    names: dict[BlockKey, bytes] = {}
    for event in tiers._slots._manager.snapshot():
        stored = event.payload
        assert isinstance(stored, Stored)
        parent = None if stored.parent is None else names[stored.parent]
        for block in stored.blocks:
            if len(block.tokens) == size:
                (name,) = named(block.tokens, stored.scope.salt, size, parent)
                parent = names[block.key] = name.hash
    return set(names.values())
