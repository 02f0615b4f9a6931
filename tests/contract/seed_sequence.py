"""One request of the seed and its sequence: tokens, keys, wishes (core spec 1, 13).

In:  the request of a case.
Out: keys of blocks, priorities.
Law: see `seed_model`.
"""

from dataclasses import dataclass, field
from typing import Any

from contract.seed_model import Key, NoFreeBlock

Step = dict[str, Any]
Answer = dict[str, Any]


@dataclass(slots=True)
class SeedSequence:
    """One request and its sequence."""

    request_id: int
    content: dict[str, Any] | None
    beam_width: int
    tokens: list[tuple[int, int]]
    num_tokens: int = 0
    prompt_length: int = 0
    front_removed: int = 0
    limit: int = 1 << 31
    prepopulated: int = 0
    stats: dict[str, int] = field(default_factory=dict)
    is_decoding: bool = False
    is_complete: bool = False

    @property
    def told_length(self) -> int:
        """Tokens of the prompt, for forecasts."""
        return len((self.content or {}).get("tokens", ())) or self.prompt_length

    @property
    def max_new(self) -> int:
        return int((self.content or {}).get("max_new_tokens", 0))

    @property
    def num_drafts(self) -> int:
        return int((self.content or {}).get("draft_len", 0))

    @property
    def forecast_length(self) -> int:
        """Tokens that the first step stores: those of the encoder, or the prompt, and drafts."""
        return int((self.content or {}).get("encoder_output_len", self.told_length)) + self.num_drafts

    @property
    def retention(self) -> dict[str, Any]:
        return (self.content or {}).get("retention") or {}

    def key(self, run: list[tuple[int, int]], start: int) -> Key:
        content = self.content or {}
        items = mm_keys(content.get("multimodal"), start, start + len(run))
        return Key("extra_ids" in content, content.get("lora_id"), content.get("salt"), items, tuple(run))

    def starts_item(self, ordinal: int, size: int) -> bool:
        """Whether an image starts in this block."""
        positions = ((self.content or {}).get("multimodal") or {}).get("positions") or []
        return any(position // size == ordinal for position in positions)

    def keys(self, usable: int, size: int, partial: bool) -> list[Key]:
        """Runs of the first `usable` tokens (core spec 1.5)."""
        if usable > len(self.tokens):
            raise NoFreeBlock
        stop = max(usable, 0) if partial else max(usable, 0) // size * size
        return [self.key(self.tokens[at : min(at + size, stop)], at) for at in range(0, stop, size)]


def mm_keys(items: dict[str, Any] | None, start: int, stop: int) -> tuple[tuple[Any, ...], ...]:
    """Core spec 1.4; lists of unequal length give nothing (D13)."""
    lists = [(items or {}).get(name) or [] for name in ("hashes", "positions", "lengths")]
    if len({len(one) for one in lists}) != 1:
        return ()
    return tuple(
        (tuple(words), max(0, start - position), max(0, position - start))
        for words, position, length in zip(*lists, strict=True)
        if stop > position and start < position + length
    )


def wishes_of(retention: dict[str, Any], size: int, length: int) -> list[tuple[int | None, int | None]]:
    """Core spec 13.3: the range that holds a block's first token decides (D45)."""
    wishes: list[tuple[int | None, int | None]] = []
    for first in range(0, length, size):
        found = (
            (one.get("priority", 35), one.get("duration_ms"))
            for one in retention.get("ranges", [])
            if one["start"] <= first and (one.get("end") is None or first < one["end"])
        )
        wishes.append(next(found, (None, None)))
    return wishes


def decode_wish(one: SeedSequence) -> tuple[int, int | None]:
    """Priority and duration of blocks outside of the prompt."""
    return one.retention.get("decode_priority", 35), one.retention.get("decode_duration_ms")
