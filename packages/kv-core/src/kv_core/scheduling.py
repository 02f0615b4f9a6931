"""How many blocks a request will take: for its next step, and until it ends (core spec 10).

In:  what the request asks for, the window's limits, how far the sequence has come.
Out: numbers of blocks, never negative, by which a scheduler admits or delays.
Law: a forecast counts what will really be allocated. A prompt takes all its blocks at once, under a sliding window too,
     and only live blocks count as already there (core spec D26). A cached block is credited only while somebody holds
     it, because a block that nobody holds is counted as free already (D60).
"""

from dataclasses import dataclass
from enum import Enum, auto

from kv_core.errors import CallerError
from kv_core.spans import ceil_div


class Phase(Enum):
    """Where a request stands."""

    CONTEXT = auto()
    """Before the first step over its prompt, or waiting for a prompt that another instance computes."""
    LATER_CONTEXT = auto()
    """A later chunk of its prompt, whose blocks the first one has taken."""
    DECODING = auto()
    COMPLETE = auto()


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks for, in tokens; `encoder_tokens` is set for a cross cache, whose blocks hold only those."""

    prompt_tokens: int
    max_new_tokens: int
    draft_tokens: int = 0
    beam_width: int = 1
    encoder_tokens: int | None = None

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.beam_width) < 1 or min(self.max_new_tokens, self.draft_tokens) < 0:
            raise CallerError(f"a request has at least one token and one beam: {self}")  # core spec D24

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """One window: its length, the longest sequence it may hold, its temporary extension, tokens per block."""

    window: int
    max_tokens: int
    tokens_per_block: int
    temporary_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a sequence is: its phase and length, live blocks of its first beam (detached ones do not count), and
    leading blocks of its prompt that are cached and held by others. A sequence not yet added has length 0."""

    phase: Phase = Phase.CONTEXT
    num_tokens: int = 0
    num_live_blocks: int = 0
    num_held_hits: int = 0


def blocks_for_next_step(demand: Demand, limits: Limits, progress: Progress, *, num_steps: int = 1) -> int:
    """Blocks that the next `num_steps` steps (one, or two with look-ahead) take of one window (core spec 10.2)."""
    if progress.phase is Phase.CONTEXT:
        tokens = demand.prompt_tokens if demand.encoder_tokens is None else demand.encoder_tokens
        return max(0, _prompt_blocks(tokens + demand.draft_tokens, demand, limits) - progress.num_held_hits)
    if progress.phase is Phase.DECODING and demand.encoder_tokens is None:
        return _growth(demand, limits, progress.num_tokens, num_steps)
    return 0


def blocks_to_completion(demand: Demand, limits: Limits, progress: Progress) -> int:
    """Blocks that must still be free for the sequence to reach its full length (core spec 10.3)."""
    if demand.encoder_tokens is not None:
        return ceil_div(demand.encoder_tokens, limits.tokens_per_block) if progress.phase is Phase.CONTEXT else 0
    width = _decoding_width(demand, limits, progress.num_tokens)
    if progress.num_live_blocks > 0:
        return max(0, width - progress.num_live_blocks) * demand.beam_width
    shared = demand.prompt_tokens // limits.tokens_per_block
    unshared = max(width, ceil_div(demand.prompt_tokens, limits.tokens_per_block)) - shared
    return max(0, shared + unshared * demand.beam_width - progress.num_held_hits)


def _prompt_blocks(num_tokens: int, demand: Demand, limits: Limits) -> int:
    """Full blocks are shared by the beams, a started one is not."""
    full, rest = divmod(num_tokens, limits.tokens_per_block)
    return full + (demand.beam_width if rest else 0)


def _growth(demand: Demand, limits: Limits, num_tokens: int, num_steps: int) -> int:
    """Growth stops at the end of the request and at the longest sequence (core spec D62)."""
    wanted = num_tokens + num_steps * (demand.draft_tokens + 1)
    stop = max(num_tokens, min(wanted, demand.num_tokens, limits.max_tokens))
    grown = ceil_div(stop, limits.tokens_per_block) - ceil_div(num_tokens, limits.tokens_per_block)
    return grown * demand.beam_width


def _decoding_width(demand: Demand, limits: Limits, num_tokens: int) -> int:
    """The most live blocks of one beam from now on, where nothing of the temporary window is given up early."""
    kept = min(demand.num_tokens, limits.window + limits.temporary_tokens)
    width = ceil_div(kept, limits.tokens_per_block)
    at_end, now = ceil_div(demand.num_tokens, limits.tokens_per_block), ceil_div(num_tokens, limits.tokens_per_block)
    slides = demand.num_tokens > limits.window and at_end > now and at_end > width
    # A sliding window straddles one block more than it is long.
    return width + int(slides)
