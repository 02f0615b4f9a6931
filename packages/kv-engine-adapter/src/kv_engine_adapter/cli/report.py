"""The table at the end of the demo.

In:  the shapes of both engines; for each chat both replies, the bytes moved and the seconds they took.
Out: text of fixed columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_engine_adapter.cli.chat import Reply
from kv_engine_adapter.cli.engines import EngineConfig

_COLUMNS = ("", "prompt", "answer", "KV moved", "rate", "first token", "first token", "answers")
_UNITS = ("", "tokens", "tokens", "", "", "handed over", "one engine", "equal")


@dataclass(frozen=True, slots=True)
class Row:
    """One chat: with hand-over, and of the decode engine alone."""

    title: str
    handed_over: Reply
    alone: Reply
    num_bytes: int
    seconds: float

    @property
    def is_equal(self) -> bool:
        return self.handed_over.text == self.alone.text

    def cells(self) -> tuple[str, ...]:
        """The row in words."""
        return (
            self.title,
            str(self.handed_over.num_prompt_tokens),
            str(self.handed_over.num_answer_tokens),
            f"{self.num_bytes / 1024:,.0f} KiB",
            f"{self.num_bytes / self.seconds / 1e6:,.0f} MB/s" if self.seconds else "-",
            f"{1e3 * self.handed_over.first_token_s:,.0f} ms",
            f"{1e3 * self.alone.first_token_s:,.0f} ms",
            "yes" if self.is_equal else "NO",
        )


def report(prefill: EngineConfig, decode: EngineConfig, rows: Sequence[Row]) -> str:
    """Shapes, then a line a chat, then the verdict."""
    lines = [_COLUMNS, _UNITS, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    table = "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return f"\n{_shapes(prefill, decode)}\n\n{table}\n\n{_verdict(rows)}"


def _shapes(prefill: EngineConfig, decode: EngineConfig) -> str:
    return "\n".join(
        f"{engine.name + ' engine:':16} TP {engine.tensor_ranks}, blocks of {engine.tokens_per_block} tokens, "
        f"{engine.connector}"
        for engine in (prefill, decode)
    )


def _verdict(rows: Sequence[Row]) -> str:
    wrong = [row for row in rows if not row.is_equal]
    if wrong:
        return "\n".join(
            f"{row.title} DIFFERS: handed over {row.handed_over.text!r}, one engine {row.alone.text!r}" for row in wrong
        )
    return (
        f"All {len(rows)} answers equal those of a single engine.\n"
        "(The model is tiny and three servers share the CPU: the times show that it works, not how fast it can be.)"
    )
