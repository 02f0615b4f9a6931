"""Requests of the cases, in our words.

In:  `request` objects of the format, and what later steps append.
Out: `kv_core` requests, scopes, retention, and the demand that forecasts need.
Law: an absent field stays absent; inconsistent multimodal lists are refused by kv_core, not here.
"""

from dataclasses import dataclass, field
from typing import Any

from kv_core.content import scope_items
from kv_core.ids import RequestId
from kv_core.keys import Scope
from kv_core.request import Admission, Request
from kv_core.retention import RangeRetention, RetentionConfig
from kv_core.scheduling import Demand, Phase

PHASES = {
    "context_init": Phase.CONTEXT,
    "disagg_generation_init": Phase.CONTEXT,
    "generation_in_progress": Phase.DECODING,
    "generation_complete": Phase.COMPLETE,
}


@dataclass(slots=True)
class CaseRequest:
    """One request of a scenario; `content` None means a sequence without a request."""

    request_id: int
    content: dict[str, Any] | None
    input_length: int
    beam_width: int
    tokens: list[int] = field(default_factory=list)
    phase: Phase = Phase.CONTEXT
    admission: Admission | None = None
    listed: dict[tuple[int, int], list[int | None]] = field(default_factory=dict)
    """Block ids by (window, beam) as the cases list them: detached ones remain."""

    def __post_init__(self) -> None:
        self.tokens = list((self.content or {}).get("tokens", ()))

    def request(self, cache_type: str) -> Request:
        """Ours. CallerError for inconsistent multimodal lists."""
        name = RequestId(str(self.request_id))
        content = self.content
        if content is None:
            return Request(name, None, num_tokens=self.input_length)
        if cache_type == "cross":
            encoder = content.get("encoder_tokens")
            length = content.get("encoder_output_len", self.input_length)
            return Request(name, encoder, scope_of(content), num_tokens=0 if encoder else length)
        return Request(
            name,
            self.tokens[: self.input_length],
            scope_of(content),
            extra_ids=content.get("extra_ids"),
            retention=retention_of(content.get("retention")),
            is_dummy=content.get("is_dummy", False),
        )

    def demand(self, cache_type: str) -> Demand:
        content = self.content or {}
        return Demand(
            len(content.get("tokens", ())) or self.input_length,
            content.get("max_new_tokens", 0),
            content.get("draft_len", 0),
            self.beam_width,
            content["encoder_output_len"] if cache_type == "cross" else None,
        )


def scope_of(content: dict[str, Any]) -> Scope:
    """Who may share: adapter, salt, images."""
    lora, salt, items = content.get("lora_id"), content.get("salt"), content.get("multimodal") or {}
    digests, positions, lengths = (items.get(key) or [] for key in ("hashes", "positions", "lengths"))
    return Scope(
        None if lora is None else str(lora),
        None if salt is None else str(salt),
        scope_items(digests, positions, lengths),
    )


def retention_of(content: dict[str, Any] | None) -> RetentionConfig | None:
    if content is None:
        return None
    ranges = (
        RangeRetention(one["start"], one.get("end"), one.get("priority", 35), one.get("duration_ms"))
        for one in content.get("ranges", [])
    )
    return RetentionConfig(tuple(ranges), content.get("decode_priority", 35), content.get("decode_duration_ms"))
