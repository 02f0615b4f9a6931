"""`docs/modules.md`: every module of every package with its first sentence, in the order of the flow.

In:  the sources; GROUPS, which says where a module stands.
Out: the page; ValueError for a module that no group names, or that is gone.

    python tools/docs/modules.py
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "modules.md"
SOURCES: Final = {
    "kv_core": ROOT / "packages/kv-core/src/kv_core",
    "kv_kernels": ROOT / "kernels/src/kv_kernels",
    "kv_transfer": ROOT / "packages/kv-transfer/src/kv_transfer",
    "kv_engine_adapter": ROOT / "packages/kv-engine-adapter/src/kv_engine_adapter",
}

GROUPS: Final[dict[str, dict[str, str]]] = {
    "kv_core": {
        "Words": "ids spans spec errors",
        "What content is called": "keys content token_log seed_hash",
        "What a manager is built from, takes and answers": "config request retention tiers events stats layout",
        "The manager": "manager registry planning admitting growing publishing pins losing inspection dry_run",
        "One window": "window sequence tree runs pool eviction victims",
        "How much fits": "sizing scheduling forecast",
        "For kernels and routers": "page_tables event_log event_json",
        "Traces": "trace replay",
    },
    "kv_kernels": {
        "Copies": "gather scatter block_copy peer convert weighted_sum",
        "Their ends": "layout block_table ends words rows launch tuning",
        "Who copies": "paged_copy reference",
    },
    "kv_transfer": {
        "What an engine sees": "transceiver instance orders config keys",
        "Who sends what to whom": "plan/",
        "What is said": "protocol/",
        "Doors and peers": "wire directory peer peers leases releases",
        "A prompt on offer": "offering growth offers tombstones",
        "Sending it": "sender admission send_session invitations passages succession",
        "Loading it": "loads load receiver arrivals turns ungranted watermark quarantine reads mappings",
        "From blocks to bytes and back": "pools request_blocks formatter/ copies gate checksum",
        "Memory that the wire may touch": "regions staging",
        "Agents, which move it": "agent/",
        "Reading blocks where they lie": "direct/ in_place/ publisher",
        "Threads, and who watches them": "core room resident reactor mover lanes timers threads pulse health faults",
        "Which way pays": "thresholds host",
        "What was moved": "reports history tally status profiling prometheus",
        "Tiers of a kv_core manager": "block_pools pool_tables device_memory copy_engine copy_queue slot_copier"
        " slot_files files file_mover file_threads process_directory",
        "The store of prefixes": "prefix_store/",
    },
    "kv_engine_adapter": {
        "Both sides": "config handover orders ports known_peers fingerprint metrics hooks",
        "The scheduler side": "scheduler families early twins idle",
        "The worker side": "worker",
        "Tiers": "tier tier_config tier_terms tier_costs retain tier_slots tier_parts tier_saves tier_jobs tier_disk"
        " tier_reports tier_events tier_orders tier_worker tier_memory",
        "vLLM": "vllm/",
        "The command": "cli/",
    },
}
"""For each package its groups; a name that ends with "/" is all of a folder."""


def modules(source: Path) -> dict[str, str]:
    """The first sentence of each module below, by its path without suffix; not of those that hold nothing."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        tree = ast.parse(path.read_text())
        if tree.body:
            name = str(path.relative_to(source).with_suffix("")).removesuffix("__init__")
            found[name] = _sentence(ast.get_docstring(tree) or "")
    return found


def _sentence(docstring: str) -> str:
    return " ".join(docstring.split("\n\n")[0].split()).replace("|", "\\|")


def grouped(package: str, found: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """The groups of a package with the modules of each. ValueError unless each module stands in one group."""
    left = dict(found)
    for group, named in GROUPS[package].items():
        names: list[str] = []
        for name in named.split():
            chosen = [each for each in found if each.startswith(name)] if name.endswith("/") else [name]
            if not chosen or not left.keys() >= set(chosen):
                raise ValueError(f"{package}: no such module, or in two groups: {name} in {group!r}")
            names += chosen
            for each in chosen:
                del left[each]
        yield group, names
    if left:
        raise ValueError(f"{package}: modules that no group of tools/docs/modules.py names: {', '.join(left)}")


def text() -> str:
    """The page."""
    lines = [
        "# Modules",
        "",
        "Every module with its first sentence; [flow.md](flow.md) shows how they work together. Made from the sources:",
        "`python tools/docs/modules.py`, where a new module is given its place.",
    ]
    for package, source in SOURCES.items():
        found = modules(source)
        lines += ["", f"## {package}"]
        for group, names in grouped(package, found):
            lines += ["", f"| {group} | |", "|---|---|", *(f"| `{name}` | {found[name]} |" for name in names)]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    FILE.write_text(text())
