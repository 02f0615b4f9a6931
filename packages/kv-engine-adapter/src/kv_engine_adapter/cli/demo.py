"""Two vLLM servers of different shapes, a router in front, chats that one of them prefills and the other answers.

In:  the directory of a small model, the name of the connector.
Out: what happens, as it happens; then a table of what it cost and whether the answers are those of a single engine.
Law: every answer is compared; the exit code is 0 only if all are equal. No process outlives the demo.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kv_engine_adapter.cli.chat import CONVERSATIONS, Chat, ChatError, Reply
from kv_engine_adapter.cli.engines import Engine, EngineConfig, Router, start_engine, start_router, wait_ready
from kv_engine_adapter.cli.processes import ProcessGuard, ProgramError
from kv_engine_adapter.cli.progress import Progress
from kv_engine_adapter.cli.report import Row, report

START_S = 600.0
# Counters of bytes and seconds in `/metrics`, for our connector and for those it can be compared with.
_MOVED = {
    "FerryConnector": ("kvferry:bytes_received_total", "kvferry:load_seconds_total"),
    "NixlConnector": ("vllm:nixl_bytes_transferred_sum", "vllm:nixl_xfer_time_seconds_sum"),
}


@dataclass(frozen=True, slots=True)
class Moved:
    """KV that the decode engine has received since it started."""

    num_bytes: float
    seconds: float

    def since(self, earlier: "Moved") -> "Moved":
        return Moved(self.num_bytes - earlier.num_bytes, self.seconds - earlier.seconds)


@dataclass(frozen=True, slots=True)
class Stage:
    """The servers of the demo."""

    prefill: Engine
    decode: Engine
    router: Router

    def moved(self) -> Moved:
        num_bytes, seconds = _MOVED.get(self.decode.config.connector or "", ("", ""))
        metrics = self.decode.metrics()
        return Moved(metrics.get(num_bytes, 0.0), metrics.get(seconds, 0.0))


def main(arguments: Sequence[str] | None = None, *, model: Path | None = None) -> int:
    """Run the demo; answers the exit code. `model` is where the model is unless the command line says otherwise."""
    options = _parser(model).parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(143))
    logs = options.logs or Path(tempfile.mkdtemp(prefix="kvferry-demo-"))
    try:
        return _demo(options.model, options.connector, logs)
    except KeyboardInterrupt:
        print("\nStopped; all servers are gone.")
        return 130
    except (ProgramError, ChatError, ModuleNotFoundError) as error:
        print(f"\nThe demo cannot go on: {error}\nThe servers' logs are in {logs}", file=sys.stderr)
        return 1


def _parser(model: Path | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=model, required=model is None, help="directory of the model")
    parser.add_argument("--connector", default="FerryConnector", help="the KV connector of both engines")
    parser.add_argument("--logs", type=Path, help="directory for the servers' logs (default: a new one under /tmp)")
    return parser


def _demo(model: Path, connector: str, logs: Path) -> int:
    print(f"Model {model}, connector {connector}, logs in {logs}")
    with _servers(model, connector, logs) as stage:
        _warm_up(stage)
        rows = [_converse(stage, chat) for chat in CONVERSATIONS]
        print(report(stage.prefill.config, stage.decode.config, rows))
    return 0 if all(row.is_equal for row in rows) else 1


@contextmanager
def _servers(model: Path, connector: str, logs: Path) -> Iterator[Stage]:
    prefill = EngineConfig(name="prefill", model=model, tensor_ranks=2, cores=("0", "1"), connector=connector)
    decode = EngineConfig(name="decode", model=model, tensor_ranks=1, cores=("1",), connector=connector)
    print("Starting a prefill engine (TP 2), a decode engine (TP 1) and a router; about a minute on two cores.")
    with ProcessGuard() as guard:
        try:
            stage = _start(guard, prefill, decode, logs)
            wait_ready([stage.prefill, stage.decode, stage.router], timeout_s=START_S, watch=Progress(sys.stdout))
            yield stage
        finally:
            print("\nStopping the servers.", flush=True)


def _start(guard: ProcessGuard, prefill: EngineConfig, decode: EngineConfig, logs: Path) -> Stage:
    first, second = start_engine(guard, prefill, logs), start_engine(guard, decode, logs)
    return Stage(first, second, start_router(guard, [first], [second], logs))


def _warm_up(stage: Stage) -> None:
    """Let both engines meet, and pay for everything that is paid for once."""
    print("Warming up: every engine computes, and the two meet.", flush=True)
    hello = Chat("hello", "Ahoy!")
    for url in (stage.router.url, stage.prefill.url, stage.decode.url):
        hello.ask(url, salt="warm-up")


def _converse(stage: Stage, chat: Chat) -> Row:
    """One chat twice: through the router, and of the decode engine alone, which computes the prompt itself."""
    before = stage.moved()
    handed_over = _spoken(chat, stage.router.url)
    moved = stage.moved().since(before)
    # The salt keeps the engine from finding the prompt in its cache, where the hand-over has just put it.
    alone = chat.ask(stage.decode.url, salt="alone")
    return Row(chat.title, handed_over, alone, int(moved.num_bytes), moved.seconds)


def _spoken(chat: Chat, url: str) -> Reply:
    print(f"\n{chat.title}: {chat.question[:60]}...\n  > ", end="", flush=True)
    reply = chat.ask(url, listen=lambda text: print(text, end="", flush=True))
    print()
    return reply


if __name__ == "__main__":
    sys.exit(main())
