"""How long a request wants its prefix kept: hints in the arguments that clients may add to a request.

In:  the mapping of a request's extra arguments (`vllm_xargs` over HTTP, `SamplingParams.extra_args` offline).
Out: `Hints`: the wishes that could be read, and for each that could not the key, the value and the reason.
Law: nothing a client sends raises. A hint that cannot be read is refused as a whole; the others stand.

    "kvferry.retain": ["0-2048:90:600s", "2048-:20"]      tokens [0, 2048) with priority 90 for 600 s, the rest with 20
    "kvferry.decode_priority": 10                          or "10:60s": the same for the tokens that are generated
    "kvferry": {"retain": [...], "decode_priority": 10}    the same as one mapping, where arguments may be nested
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from kv_core.errors import CallerError
from kv_core.retention import RangeRetention, Retention, RetentionConfig

PREFIX: Final = "kvferry"
MAX_RANGES: Final = 64
MAX_DURATION_MS: Final = 30 * 24 * 3600 * 1000
"""30 days."""

_WISH: Final = r"(?P<priority>\d{1,4})(?::(?P<duration>\d{1,12})(?P<unit>ms|s|m|h))?"
_RANGE: Final = re.compile(rf"(?P<start>\d{{1,10}})-(?P<stop>\d{{1,10}})?:{_WISH}", re.ASCII)
_DECODE: Final = re.compile(_WISH, re.ASCII)
_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}


class Refusal(NamedTuple):
    """A hint that is not followed."""

    key: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request wishes for its blocks."""

    ranges: tuple[RangeRetention, ...] = ()
    decode: Retention | None = None
    refused: tuple[Refusal, ...] = ()

    def config(self, num_prompt_tokens: int) -> RetentionConfig | None:
        """The wishes for all tokens of a request, generated ones behind its prompt; `None` if it has none."""
        wishes = [_clipped(wish, num_prompt_tokens) for wish in self.ranges if wish.start < num_prompt_tokens]
        if self.decode is not None:
            assert self.decode.priority is not None, "law: a wish that was read has a priority"
            wishes.append(RangeRetention(num_prompt_tokens, None, self.decode.priority, self.decode.duration_ms))
        return RetentionConfig(tuple(wishes)) if wishes else None


NO_HINTS: Final = Hints()


def hints_of(arguments: Mapping[str, object] | None) -> Hints:
    """The hints among the extra arguments of a request."""
    ranges: tuple[RangeRetention, ...] = ()
    decode: Retention | None = None
    refused: list[Refusal] = []
    for key, value in _ours(arguments):
        try:
            if key == "retain":
                ranges = _ranges(value)
            elif key == "decode_priority":
                decode = _decode(value)
            else:
                raise CallerError("no such hint; known are retain, decode_priority")
        except CallerError as error:
            refused.append(Refusal(f"{PREFIX}.{key}"[:80], f"{value!r:.80}", str(error)))
    return Hints(ranges, decode, tuple(refused)) if ranges or decode or refused else NO_HINTS


def _ours(arguments: Mapping[str, object] | None) -> Iterator[tuple[str, object]]:
    for key, value in (arguments or {}).items():
        if key == PREFIX and isinstance(value, Mapping):
            yield from ((str(inner), wish) for inner, wish in value.items())
        elif key == PREFIX:
            yield "", value
        elif isinstance(key, str) and key.startswith(f"{PREFIX}."):
            yield key.removeprefix(f"{PREFIX}."), value


def _ranges(value: object) -> tuple[RangeRetention, ...]:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list | tuple):
        raise CallerError("expected a list of ranges such as '0-2048:90:600s'")
    if len(entries) > MAX_RANGES:
        raise CallerError(f"expected at most {MAX_RANGES} ranges, got {len(entries)}")
    # Why through the config: it is what knows that ranges may not overlap.
    return RetentionConfig(tuple(_range(entry) for entry in entries)).ranges


def _range(entry: object) -> RangeRetention:
    found = _RANGE.fullmatch(entry) if isinstance(entry, str) else None
    if found is None:
        raise CallerError(f"expected start-[stop]:priority[:duration] such as '0-2048:90:600s', got {entry!r:.80}")
    stop = None if found["stop"] is None else int(found["stop"])
    return RangeRetention(int(found["start"]), stop, int(found["priority"]), _duration_ms(found))


def _decode(value: object) -> Retention:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    found = _DECODE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise CallerError("expected priority[:duration] such as 10 or '10:60s'")
    # The config checks the priority.
    return RetentionConfig((), int(found["priority"]), _duration_ms(found)).decode


def _duration_ms(found: re.Match[str]) -> int | None:
    if found["duration"] is None:
        return None
    duration_ms = int(found["duration"]) * _UNIT_MS[found["unit"]]
    if duration_ms > MAX_DURATION_MS:
        raise CallerError(f"expected a duration of at most 30 days, got {duration_ms} ms")
    return duration_ms


def _clipped(wish: RangeRetention, num_tokens: int) -> RangeRetention:
    stop = num_tokens if wish.stop is None else min(wish.stop, num_tokens)
    return RangeRetention(wish.start, stop, wish.priority, wish.duration_ms)
