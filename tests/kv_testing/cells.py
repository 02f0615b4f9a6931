"""The cells of the matrix: which vLLM, which model, under which switches an engine hands over.

Out: `CELLS`, every cell that vLLM runs on a CPU; `cover`, few of them in which any two values meet that meet in any;
     `OTHERS`, cells of models beside the matrix that nothing else shows with the older version.
Law: what is left out is in `REFUSED`, with the words of who refuses it.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from model.make_tiny import SHAPES

from kv_testing.servers import OLDER, TOKENS_PER_BLOCK

INSTALLED = "0.32.0"
VERSIONS = (OLDER, INSTALLED)
MODELS = ("full", "hybrid", "latent")
CHECKPOINTS = {"full": "tiny"}
"""Models of which the checkpoint has another name."""
TOKENS_PER_STEP = 128
BLOCK = TOKENS_PER_BLOCK
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration, of the prefill engine as of the decode engine."""

    vllm: str
    model: str
    is_child: bool
    """Under MultiConnector, with vLLM's ExampleConnector behind ours."""
    keeps_prefixes: bool
    chunks_prompts: bool
    speculates: bool

    def __str__(self) -> str:
        switches = {
            "child" if self.is_child else "alone": True,
            "prefixes": self.keeps_prefixes,
            "chunks": self.chunks_prompts,
            "ngram": self.speculates,
        }
        return "-".join([self.vllm, self.model, *(name for name, on in switches.items() if on)])

    @property
    def keeps_all_tokens(self) -> bool:
        """Whether vLLM's hybrid manager is off, as it is where a child connector does not know it."""
        return self.is_child

    def arguments(self, stored: Path) -> tuple[str, ...]:
        """What its engines are told beyond the usual; the other child keeps its files in `stored`."""
        words = ["--enable-prefix-caching" if self.keeps_prefixes else "--no-enable-prefix-caching"]
        if self.chunks_prompts:
            words += ["--enable-chunked-prefill", "--max-num-batched-tokens", str(TOKENS_PER_STEP)]
        else:
            words += ["--no-enable-chunked-prefill"]
        if self.speculates:
            words += ["--speculative-config", json.dumps(SPECULATION)]
        if self.model == "codes":
            words += ["--kv-cache-dtype", "fp8_e4m3"]
        return (*words, *(_under_multi(stored) if self.is_child else ()))

    def num_bytes(self, num_tokens: int, num_known: int) -> int:
        """What travels: all tokens but the last and those known; of a window whole blocks of what the last one sees."""
        last, shape = num_tokens - 1, SHAPES["llama" if self.model == "full" else self.model]
        if self.model == "latent":
            return (last - num_known) * shape.num_layers * (shape.rank + shape.rope_size) * 4
        plain = getattr(shape, "llama", shape)
        starts = [num_known] * plain.num_layers
        if self.model == "hybrid" and not self.keeps_all_tokens:
            seen = max(0, num_tokens - shape.window) // BLOCK * BLOCK
            starts = [max(num_known, seen if kind == "sliding_attention" else 0) for kind in shape.layer_types]
        element_bytes = 1 if self.model == "codes" else 4
        return sum(last - start for start in starts) * 2 * plain.num_kv_heads * plain.head_size * element_bytes


def _under_multi(stored: Path) -> tuple[str, ...]:
    """The last of two such arguments counts."""
    common = {"kv_role": "kv_both", "kv_buffer_device": "cpu"}
    hooks = {"test_hooks_dir": str(hooks_beside(stored))}
    children = [
        common | {"kv_connector": "FerryConnector", "kv_connector_extra_config": hooks},
        common
        | {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(stored)}},
    ]
    multi = common | {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}
    return "--kv-transfer-config", json.dumps(multi | {"kv_load_failure_policy": "recompute"})


def hooks_beside(stored: Path) -> Path:
    """Where an engine looks for faults."""
    return stored.with_name(f"{stored.name}-hooks")


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is not done on a CPU, who refuses it, and the words of the log that say so."""

    by: str
    vllm: str
    model: str
    asked: tuple[str, ...]
    words: str


REFUSED = (
    Refusal("vLLM", OLDER, "latent", (), "MLA is not supported on CPU"),
    Refusal(
        "vLLM",
        INSTALLED,
        "latent",
        ("--enable-prefix-caching", "--enable-chunked-prefill"),
        "forcing chunked prefill and prefix caching to be disabled",
    ),
    Refusal("FerryConnector", OLDER, "hybrid", (), "the window of some when its hybrid cache manager is off"),
    Refusal("FerryConnector", OLDER, "windows", (), "supported=vLLM 0.30 and later"),
)


def _is_refused(cell: Cell) -> bool:
    if cell.vllm == OLDER:
        return cell.model != "full"
    return cell.model == "latent" and (cell.keeps_prefixes or cell.chunks_prompts)


_SWITCH = (False, True)
CELLS = tuple(
    cell
    for values in itertools.product(VERSIONS, MODELS, _SWITCH, _SWITCH, _SWITCH, _SWITCH)
    if not _is_refused(cell := Cell(*values))
)

OTHERS = tuple(
    Cell(OLDER, model, is_child=False, keeps_prefixes=True, chunks_prompts=True, speculates=False)
    for model in ("chunks", "codes")
)


def cover(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Cells that show every pair of values that any cell shows, chosen one after the other, the most telling first."""
    missing, chosen = {pair for cell in cells for pair in pairs(cell)}, list[Cell]()
    while missing:
        chosen.append(max(cells, key=lambda cell: len(missing & pairs(cell))))
        missing -= pairs(chosen[-1])
    return tuple(sorted(chosen, key=cells.index))


def pairs(cell: Cell) -> frozenset[tuple[tuple[str, object], ...]]:
    """Every two values of a cell, each with its name."""
    values = [(each.name, getattr(cell, each.name)) for each in fields(cell)]
    return frozenset(itertools.combinations(values, 2))
