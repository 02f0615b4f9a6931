"""Configurations, scopes and retention wishes that are worth trying on a manager.

In:  nothing.
Out: WORLDS; SCOPES and RETENTIONS that any request of theirs may have.
Law: small enough that blocks run out, so that every rule about giving up is met.
"""

from dataclasses import dataclass

from kv_core.config import CacheType, ManagerConfig, WindowConfig
from kv_core.keys import Scope
from kv_core.retention import RangeRetention, RetentionConfig


@dataclass(frozen=True)
class World:
    """One configuration worth trying."""

    windows: tuple[WindowConfig, ...]
    tokens_per_block: int = 4
    max_length: int = 40
    beams: int = 1
    partial: bool = True
    copy: bool = True
    onboard: bool = True
    max_rewind: int = 0
    reuse: bool = True
    events: bool = False
    cross: bool = False

    def config(self):
        return ManagerConfig(
            tokens_per_block=self.tokens_per_block,
            windows=self.windows,
            max_sequence_length=self.max_length,
            max_beam_width=self.beams,
            cache_type=CacheType.CROSS if self.cross else CacheType.SELF,
            reuse=self.reuse,
            partial_reuse=self.partial,
            copy_on_partial=self.copy,
            onboard=self.onboard,
            max_rewind=self.max_rewind,
            event_buffer_size=100_000 if self.events else 0,
        )


WORLDS = (
    World((WindowConfig(40, 12),)),
    World((WindowConfig(40, 14),), events=True),
    World((WindowConfig(40, 12),), copy=False),
    World((WindowConfig(40, 12),), partial=False),
    World((WindowConfig(40, 10, 6),), events=True),
    World((WindowConfig(40, 10, 3, 4),), events=True),
    World((WindowConfig(40, 10, 6),), onboard=False),
    World((WindowConfig(40, 20, 4),), beams=3),
    World((WindowConfig(40, 20),), beams=2, reuse=False),
    World((WindowConfig(8, 14),), events=True),
    World((WindowConfig(9, 13),), max_rewind=3, events=True),
    World((WindowConfig(3, 12), WindowConfig(40, 12))),
    World((WindowConfig(6, 12), WindowConfig(12, 12, 4), WindowConfig(40, 13, 5)), events=True, max_rewind=2),
    World((WindowConfig(40, 24),), tokens_per_block=1, max_length=20),
    World((WindowConfig(5, 24, 8), WindowConfig(20, 24)), tokens_per_block=2, max_length=20),
    World((WindowConfig(40, 12),), cross=True, beams=2),
)

SCOPES = (
    Scope(lora="a"),
    Scope(salt="a"),
    Scope(extras=((b"x" * 8, 2),)),
    Scope(extras=((b"y" * 8, 2),)),
    Scope(extras=((b"x" * 8, 5), (b"z" * 8, 6))),
)
RETENTIONS = (
    RetentionConfig(),
    RetentionConfig((RangeRetention(0, None, 80),), 20),
    RetentionConfig((RangeRetention(0, 5, 90, 10),)),
    RetentionConfig((RangeRetention(4, 9, 10), RangeRetention(12, None, 60, 5)), 50, 10),
    RetentionConfig((RangeRetention(0, None, 35, 5),), 70, 3),
)
