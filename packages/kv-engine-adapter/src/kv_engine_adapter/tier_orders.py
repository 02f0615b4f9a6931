"""What the host and disk tiers ask of the worker ranks, and what these answer.

Out: `TierOrders`, one value for each engine step; `Answer`, from every rank for every job once.
Law: torch-free and picklable. A job names host slots that belong to it until every rank has answered, except those a
load reads: what is written into them later is ordered later, and a rank obeys in order.

A host slot has room for one block of the engine, all layers and heads of the rank. Of a cache group with a window its
part may be absent: what the window had left behind when the slot was filled.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, NewType

from kv_core.ids import RequestId
from kv_core.keys import Scope
from kv_core.spans import Span
from kv_engine_adapter.orders import Tables

JobId = NewType("JobId", int)
"""Number of a job, counted from 0 in one run of an engine."""

Slots = tuple[int, ...]
"""Host slots by ordinal, from the first block of the job's tokens on."""


Absent = tuple[frozenset[int], ...]
"""For each cache group the ordinals of blocks whose part of a slot a job leaves out; none at all: it brings all."""


class Wish(NamedTuple):
    """How long the tokens of a span are wanted on disk; `duration_ms` from when they are written, `None` for ever."""

    tokens: Span
    priority: int
    duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens of a prompt (or more of a request), packed as signed 32-bit little-endian, and who may share them."""

    packed: bytes
    scope: Scope


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """Copy the blocks of `tokens` from the device into host slots; answered when the device's are not needed any more.

    With `write`, the prefix goes on to disk from there, as another job.
    """

    job: JobId
    tokens: Span
    slots: Slots
    tables: Tables
    within_s: float
    write: "WriteToDisk | None" = None
    absent: Absent = ()


@dataclass(frozen=True, slots=True)
class WriteToDisk:
    """Write a prefix from host slots, which lists those of all its blocks, to the disk.

    A record ends at `prompt_end` too, if that is not 0: there the same prompt, asked again, stops.
    """

    job: JobId
    prefix: Prefix
    slots: Slots
    wishes: tuple[Wish, ...]
    prompt_end: int = 0
    absent: Absent = ()


@dataclass(frozen=True, slots=True)
class LoadTokens:
    """Copy tokens from host slots into a request's blocks on the device; the request is reported with the answer.

    Where a window has left a block behind, the tables have a hole.
    """

    job: JobId
    request_id: RequestId
    tokens: Span
    slots: Slots
    tables: Tables
    within_s: float


@dataclass(frozen=True, slots=True)
class FindOnDisk:
    """Tell how many of the prefix's tokens the disk holds."""

    job: JobId
    prefix: Prefix
    within_s: float


@dataclass(frozen=True, slots=True)
class FetchFromDisk:
    """Read tokens of the prefix into host slots, which lists those of all its blocks; answered with where it ended."""

    job: JobId
    prefix: Prefix
    tokens: Span
    slots: Slots
    within_s: float
    absent: Absent = ()


Job = SaveBlocks | LoadTokens | FindOnDisk | FetchFromDisk


@dataclass(frozen=True, slots=True)
class TierOrders:
    """The jobs of one engine step, in the order in which every rank obeys."""

    jobs: tuple[Job, ...] = ()


class Answer(NamedTuple):
    """A rank is done with a job: up to which token it went well; below the job's last one it did not."""

    job: JobId
    num_tokens: int


class Rates(NamedTuple):
    """What a rank measured at its start: seconds a token of its own bytes; `None` where nothing was to be measured."""

    host_token_s: float | None = None
    """From a host slot into a block of the device."""
    disk_token_s: float | None = None
    """From a file, verified, into memory."""


class Tally(NamedTuple):
    """Answers of several ranks to one job: how many ranks, and the least of what they say."""

    num_ranks: int
    num_tokens: int


def tallied(answers: Iterable[Answer]) -> dict[JobId, Tally]:
    """The answers of one rank, ready to be joined with others'."""
    return {answer.job: Tally(1, answer.num_tokens) for answer in answers}


def slowest(ours: Rates, theirs: Rates) -> Rates:
    """The rates of ranks that copy at once."""
    pairs = zip(ours, theirs, strict=True)
    return Rates(*(max((rate for rate in pair if rate is not None), default=None) for pair in pairs))


def joined(ours: Mapping[JobId, Tally], theirs: Mapping[JobId, Tally]) -> dict[JobId, Tally]:
    """The answers of different ranks, or of different steps, to the same jobs."""
    found = dict(ours)
    for job, tally in theirs.items():
        other = found.get(job, Tally(0, tally.num_tokens))
        found[job] = Tally(other.num_ranks + tally.num_ranks, min(other.num_tokens, tally.num_tokens))
    return found
