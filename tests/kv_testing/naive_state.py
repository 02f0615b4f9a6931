"""What the naive manager knows, and what it does to single blocks on every occasion (see `naive_manager`)."""

from dataclasses import dataclass

from kv_core.config import ManagerConfig
from kv_core.request import Request
from kv_core.retention import DEFAULT_PRIORITY, Retention
from kv_testing.naive_window import NaiveWindow


@dataclass(eq=False)
class NaiveSequence:
    request: Request
    beam_width: int
    tokens: list | None
    num_tokens: int
    tables: list
    shared: int = 0

    def wish(self, ordinal, size, reuse):
        config = self.request.retention
        if config is None or not reuse:
            return Retention()
        wishes = config.per_block(size, self.request.length)
        return wishes[ordinal] if ordinal < len(wishes) else config.decode


@dataclass(eq=False)
class NaivePin:
    held: list  # (window, tail, blocks), one or more a window
    paths: dict  # blocks that were in the tree, by window
    waiting: set  # given up, but others of the pin hang on them


class NaiveState:
    """Windows, sequences, pins and the copies that were ordered."""

    def __init__(self, config: ManagerConfig, clock_ms):
        self.config = config
        self.copies = []
        self.windows = [NaiveWindow(config, window, self.copies, clock_ms) for window in config.windows]
        self.sequences = {}
        self.pins = []
        self.now = 0
        self.clock_ms = clock_ms

    def own(self, window, sequence, ordinal, blocks):
        for block in blocks:
            block.owners += 1
            self.wish_private(window, sequence, ordinal, block, keep=False)

    def wish_private(self, window, sequence, ordinal, block, *, keep):
        wish = sequence.wish(ordinal, window.T, self.config.reuse)
        if wish.priority is not None:
            block.priority, block.duration_ms = wish.priority, wish.duration_ms
        elif not keep:
            block.priority, block.duration_ms = DEFAULT_PRIORITY, None

    def keep(self, block, wish):
        if wish.priority is None:
            return
        if block.held > 1:
            wish = Retention(block.priority, block.duration_ms).stronger(wish)
        block.priority, block.duration_ms = wish.priority, wish.duration_ms

    def let_go(self, window, block, *, spare=False):
        block.owners -= 1
        if not block.held:
            window.free(block, spare=spare)
