"""Servers that start without importing vLLM: forks of a process, the stem, that has imported it.

In:  the guard, which vLLM; then what `start_engine` takes.
Out: an `Engine` as any other, in a session of its own.
Law: a fork runs the same command line in the same environment as a program that is started from nothing; it is the
     guard's, which adopts orphans.

An import takes 9 s of a core for each server, which a stem pays once for all servers of one version.
"""

import gc
import importlib
import json
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from environment.vllm_builds import environment_of

from kv_engine_adapter.cli.engines import (
    HOST,
    SERVER,
    Engine,
    EngineConfig,
    engine_arguments,
    engine_environment,
    free_port,
)
from kv_engine_adapter.cli.processes import ProcessGuard, Program
from kv_testing.waiting import wait_for

IMPORTED_S = 120.0
# All of Python that a server on a CPU imports, and no library that reads its environment when it is loaded.
_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma3",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.example_connector",
    "kv_engine_adapter.vllm.connector",
    "kv_engine_adapter.worker",
    "kv_engine_adapter.scheduler",
    "transformers",
)


@dataclass(frozen=True, slots=True)
class Stem:
    """A process that has imported one version of vLLM, or soon will have."""

    guard: ProcessGuard
    vllm: str | None
    program: Program
    door: Path

    def start_engine(self, config: EngineConfig, logs: Path) -> Engine:
        """Start one server; its log is `logs/<name>.log`, begun anew."""
        port = config.port or free_port()
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{config.name}.log"
        log.write_text("")
        command = engine_arguments(config, port)
        words = command[command.index(SERVER) :]
        environment = {**engine_environment(config), **environment_of(self.vllm)}
        return Engine(config, f"http://{HOST}:{port}", self.guard.adopted(self._fork(words, environment, log), log))

    def _fork(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        wait_for(lambda: self.door.exists() or self._has_ended(), IMPORTED_S, "a stem to import vLLM")
        with socket.socket(socket.AF_UNIX) as call:
            call.connect(str(self.door))
            call.sendall(json.dumps([list(words), dict(environment), str(log)]).encode() + b"\n")
            return int(call.recv(32))

    def _has_ended(self) -> bool:
        assert self.program.exit_code() is None, f"the stem has ended:\n{self.program.log_tail()}"
        return False


def start_stem(guard: ProcessGuard, vllm: str | None, folder: Path) -> Stem:
    """Begin to import this version of vLLM (the installed one if None)."""
    door, log = folder / f"stem-{vllm}.socket", folder / f"stem-{vllm}.log"
    command = [sys.executable, "-m", __name__, str(door)]
    places = [*environment_of(vllm).get("PYTHONPATH", "").split(os.pathsep), *(place for place in sys.path if place)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
    return Stem(guard, vllm, guard.start(command, env=environment, log=log), door)


def main(door: Path) -> None:
    """Import, then fork a server for each caller who asks."""
    from kv_engine_adapter.vllm.serve import calm

    calm()
    for module in _MODULES:
        importlib.import_module(module)
    from vllm.model_executor.models import registry

    # To keep GPUs from being touched too early, vLLM looks at a model's class in a process that imports all once more.
    registry._run_in_subprocess = lambda look: look()
    gc.collect()
    gc.freeze()
    ready = door.with_suffix(".new")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(ready))
        listener.listen()
        ready.rename(door)
        while True:
            call, _ = listener.accept()
            with call, call.makefile() as asked:
                call.sendall(b"%d" % _born(json.loads(asked.readline()), listener, call))


def _born(asked: Sequence[Any], *ours: socket.socket) -> int:
    """The process id of a new server: a child of a child that has ended, so whoever adopts orphans takes it."""
    told, tell = os.pipe()
    if (between := os.fork()) == 0:
        if os.fork() == 0:
            os.setsid()
            os.write(tell, b"%d" % os.getpid())
            for each in ours:
                each.close()
            os.close(told)
            os.close(tell)
            _serve(*asked)
        os._exit(0)
    os.waitpid(between, 0)
    os.close(tell)
    with os.fdopen(told, "rb") as answer:
        return int(answer.read())


def _serve(words: Sequence[str], environment: Mapping[str, str], log: str) -> NoReturn:
    """Be the server."""
    with Path(log).open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(words)
    code = 1
    try:
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
