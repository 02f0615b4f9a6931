"""What random scenarios are like: which steps, requests and configurations may occur.

In:  a random source.
Out: `Flavour`, `FLAVOURS`, configurations.
Law: one flavour, one subject; together they have every operation of the format.
"""

from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class Flavour:
    """What may occur in the scenarios: kinds of steps with their weights, and what requests and configs are like."""

    steps: tuple[str, ...] = ()
    host: bool = False
    sliding: bool = False
    retention: bool = False
    durations: bool = False
    scopes: bool = False
    items: bool = False
    events: bool = False
    beams: int = 1
    setups: bool = False
    cross: bool = False
    windows: tuple[tuple[str, str], ...] = (("8", "32"),)

    @property
    def ranges(self) -> bool:
        return "range" in self.steps

    def config(self, random: Random) -> dict[str, Any]:
        """A configuration, and what of it this flavour varies."""
        num_host = random.choice([0, 2, 4]) if self.host else 0
        windows = {"32": [random.choice([4, 6, 8]), num_host]}
        if self.sliding:
            first, second = random.choice(self.windows)
            windows = {first: [random.choice([6, 8]), 0]} | ({second: [8, 0]} if random.random() < 0.5 else {})
        config = {
            "target": "kv_cache_manager",
            "num_layers": 2,
            "num_kv_heads": 1,
            "size_per_head": 16,
            "tokens_per_block": 4,
            "max_num_sequences": 8,
            "max_beam_width": self.beams,
            "dtype": "half",
            "sink_token_length": 0,
            "enable_block_reuse": not self.cross and (not self.ranges or random.random() < 0.8),
            "onboard_blocks": True,
            "cache_type": "cross" if self.cross else "self",
            "secondary_offload_min_priority": None,
            "event_buffer_max_size": 64 if self.events else None,
            "enable_partial_reuse": random.random() < 0.7,
            "copy_on_partial_reuse": random.random() < 0.7,
            "max_attention_window_vec": [int(window) for window in windows],
            "max_sequence_length": 32,
            "blocks_per_window": windows,
        }
        return config | _a_setup(random) if self.setups else config


def _a_setup(random: Random) -> dict[str, Any]:
    setup: dict[str, Any] = {
        "enable_block_reuse": random.random() < 0.7,
        "onboard_blocks": random.random() < 0.7,
        "cache_type": random.choice(["self", "self", "self_k_only"]),
        "tokens_per_block": random.choice([4, 4, 2, 1, 5]),
        "secondary_offload_min_priority": random.choice([None, 36, 10]),
        "blocks_per_window": {"32": [random.choice([8, 12]), random.choice([0, 0, 4])]},
    }
    if random.random() < 0.3:
        setup["connector_matched_tokens"] = random.choice([0, 1, 4])
    return setup


USUAL = ("add",) * 9 + ("decode",) * 4 + ("store_context",) * 2 + ("remove",) * 4
FLAVOURS = {
    "plain": Flavour(),
    "wishes": Flavour(("inspect",) * 2, retention=True, scopes=True),
    "tiers": Flavour(host=True),
    "windows": Flavour(sliding=True),
    "events": Flavour(("events",) * 2, events=True, host=True),
    "ranges": Flavour(("range",) * 3),
    "ranges of windows": Flavour(("range",) * 3, sliding=True),
    "two windows": Flavour(
        ("rewind", "add_token", "find", "valid", "counters", "dry_run"),
        sliding=True,
        windows=(("8", "16"), ("8", "12")),
    ),
    "odd windows": Flavour(("rewind", "find", "store_for_reuse"), sliding=True, windows=(("6", "32"), ("7", "13"))),
    "questions": Flavour(("find", "find_new", "counters", "inspect_request", "last_block", "valid", "verify")),
    "pins": Flavour(("pin",) * 2 + ("store_for_reuse",) * 2 + ("unpin",) * 4),
    "rewinds": Flavour(("rewind",) * 3 + ("add_token", "append", "store_new", "store_for_reuse")),
    "beams": Flavour(("add_token", "inspect", "counters"), beams=3),
    "time": Flavour(("advance",) * 3 + ("refresh",) * 3 + ("inspect",), retention=True, durations=True, host=True),
    "moves": Flavour(("set_priority",) * 2 + ("offload", "onboard", "inspect"), host=True),
    "items": Flavour(("find",), items=True, scopes=True),
    "forecasts": Flavour(("needed",) * 3 + ("remaining",) * 3 + ("state", "dry_run", "prepare"), sliding=True),
    "setups": Flavour(("add_token", "counters", "find"), setups=True),
    "cross": Flavour(("counters", "pin", "unpin"), cross=True, beams=2),
    "sliding pins": Flavour(("pin", "unpin", "valid", "rewind", "store_for_reuse", "counters"), sliding=True),
    "sliding events": Flavour(("events",) * 2 + ("find",), events=True, sliding=True),
}
