"""Cases as they stand in files: loading, compact lists written out, what a file may contain.

In:  a folder of JSON files, each a list of cases (format: cases/README.md).
Out: `Case` values, and the kinds that the driver knows.
Law: nothing is dropped: a case that cannot be understood becomes a case that fails.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORE_TARGETS = {"kv_cache_manager", "eviction_policy"}
TRANSFER_TARGETS = {"transfer_pair", "trans_buffer_manager"}
TRANSFER_OPS = {"block_range_for_sending", "block_range_for_receiving", "iterate_sequence_blocks"}
TRANSFER_FUNCTIONS = {
    "target_ranks",
    "pick_recv_connections",
    "send_buffer_sizes",
    "recv_buffer_sizes",
    "inquire_support_mha",
    "inquire_support_mla",
    "block_num_accounting_for_cp",
    "global_block_id_accounting_for_cp",
    "cp_sequence_share",
    "check_alternate_window",
    "pre_alloc_buffer_size",
    "request_info_round_trip",
    "cache_state_equal",
    "iterate_block_range",
    "iterate_sequence_blocks",
}


class UnknownKind(Exception):
    """The driver does not know this kind of case, function, target or operation."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case of one file; `content` is the JSON object with all compact lists written out."""

    file: str
    content: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.content.get("name", "?"))

    @property
    def kind(self) -> str:
        return str(self.content.get("kind", "?"))

    @property
    def is_heavy(self) -> bool:
        return bool(self.content.get("heavy", False))

    @property
    def is_uncertain(self) -> bool:
        return bool(self.content.get("uncertain", False))

    @property
    def is_transfer(self) -> bool:
        """Whether the case judges the exchange between instances and not the manager."""
        if self.kind == "function":
            return self.content.get("fn") in TRANSFER_FUNCTIONS
        target = self.content.get("config", {}).get("target")
        ops = {step.get("op") for step in self.content.get("steps", [])}
        return target in TRANSFER_TARGETS or (target in CORE_TARGETS and bool(ops & TRANSFER_OPS))


def load_cases(folder: Path) -> list[Case]:
    """All cases of all JSON files in `folder`, files in order of their names."""
    return [case for path in sorted(folder.glob("*.json")) for case in _load_file(path)]


def _load_file(path: Path) -> list[Case]:
    try:
        contents = json.loads(path.read_text())
    except ValueError as error:
        return [Case(path.name, {"name": path.stem, "kind": f"unreadable: {error}"})]
    if not isinstance(contents, list):
        return [Case(path.name, {"name": path.stem, "kind": "a file that is no list"})]
    return [Case(path.name, written_out(content)) for content in contents]


def written_out(value: Any) -> Any:
    """`value` with {"range": [a, b]} and {"repeat": [v, n]} as plain lists, at any depth."""
    if isinstance(value, list):
        return [written_out(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"range"}:
        return list(range(*value["range"]))
    if set(value) == {"repeat"}:
        return [value["repeat"][0]] * value["repeat"][1]
    return {key: written_out(item) for key, item in value.items()}
