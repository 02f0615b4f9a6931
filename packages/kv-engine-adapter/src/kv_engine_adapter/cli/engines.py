"""Inference engines and the router in front of them, as server processes that we start and watch.

In:  an `EngineConfig` (model, shape, connector) or the addresses a router is to serve.
Out: an `Engine` or `Router`: its address, whether it is ready, its metrics.
Law: a server is only waited for until a deadline; one that ends early is reported with the end of its log.
"""

import json
import os
import random
import re
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from kv_engine_adapter.cli.processes import ProcessGuard, Program, ProgramError

HOST = "127.0.0.1"
MODEL_NAME = "tiny"
SERVER = "kv_engine_adapter.vllm.serve"
# Below the range from which Linux takes ports for outgoing connections, so that none is lost between look and use.
_PORTS = range(20000, 32000)
# What vLLM 0.25 to 0.32 writes to its log, in the order of a start.
_STAGES = (
    ("Started server process", "serving"),
    ("init engine", "opening the server"),
    ("CPU KV cache size", "allocating the cache"),
    ("KV cache size", "allocating the cache"),
    ("Loading weights took", "weights loaded"),
    ("rank 0 in world size", "loading weights"),
    ("Initializing a V1 LLM engine", "starting workers"),
    ("non-default args", "reading the model"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One vLLM server. `cores`: for each tensor rank the cores of its threads; cache and prompt sizes in tokens; any
    free port unless one is named.

    More than seven fields, because it stands for a command line.
    """

    name: str
    model: Path
    tensor_ranks: int = 1
    cores: tuple[str, ...] = ("0",)
    connector: str | None = "FerryConnector"
    connector_options: Mapping[str, object] = field(default_factory=dict)
    load_failure_policy: str = "recompute"
    tokens_per_block: int = 32
    num_blocks: int = 256
    max_prompt_tokens: int = 1024
    extra_arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None


class Server(Protocol):
    """What is waited for: an engine or a router."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def program(self) -> Program: ...

    def stage(self) -> str:
        """How far its start has come, in a few words."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A started vLLM server."""

    config: EngineConfig
    url: str
    program: Program

    @property
    def name(self) -> str:
        return self.config.name

    def stage(self) -> str:
        log = self.program.log.read_text(errors="replace")
        return next((stage for sign, stage in _STAGES if sign in log), "importing")

    def reborn(self) -> EngineConfig:
        """What starts another run of it at the same address."""
        return replace(self.config, port=int(self.url.rpartition(":")[2]))

    def metrics(self) -> dict[str, float]:
        """Every series of `/metrics`, summed over its labels."""
        return read_metrics(self.url)

    def stop(self) -> None:
        """Freeze all its processes, as a hung machine would."""
        self.program.signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """Let stopped processes run again."""
        self.program.signal_all(signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class Router:
    """A started `vllm-router`."""

    url: str
    program: Program
    name: str = "router"

    def stage(self) -> str:
        return "waiting for the engines"


@dataclass(frozen=True, slots=True)
class StartUp:
    """What a watcher is shown while servers start."""

    seconds: float
    stages: Mapping[str, str]


def start_engine(guard: ProcessGuard, config: EngineConfig, logs: Path) -> Engine:
    """Start one vLLM server; its log is `logs/<name>.log`."""
    port = config.port or free_port()
    program = guard.start(
        engine_arguments(config, port), env=engine_environment(config), log=_fresh_log(logs, config.name)
    )
    return Engine(config, f"http://{HOST}:{port}", program)


def engine_arguments(config: EngineConfig, port: int) -> list[str]:
    """The command line of the server."""
    arguments = {
        "--model": config.model,
        "--served-model-name": MODEL_NAME,
        "--host": HOST,
        "--port": port,
        "--dtype": "float32",
        "--block-size": config.tokens_per_block,
        "--num-gpu-blocks-override": config.num_blocks,
        "--max-model-len": config.max_prompt_tokens,
        "--max-num-batched-tokens": config.max_prompt_tokens,
        "--max-num-seqs": 64,
        "--max-logprobs": 5,
        "--tensor-parallel-size": config.tensor_ranks,
    }
    if config.connector is not None:
        arguments["--kv-transfer-config"] = json.dumps(_transfer_config(config))
    flat = (str(word) for pair in arguments.items() for word in pair)
    return [
        sys.executable,
        "-m",
        SERVER,
        *flat,
        "--enforce-eager",
        *config.extra_arguments,
    ]


def engine_environment(config: EngineConfig) -> dict[str, str]:
    """Our own environment, set up for a small offline engine on the CPU."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(config.cores),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        **config.environment,
    }


def _transfer_config(config: EngineConfig) -> dict[str, object]:
    return {
        "kv_connector": config.connector,
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": config.load_failure_policy,
        "kv_connector_extra_config": dict(config.connector_options),
    }


def start_router(guard: ProcessGuard, prefill: Iterable[Engine], decode: Iterable[Engine], logs: Path) -> Router:
    """Start the published `vllm-router` in front of prefill and decode engines."""
    port = free_port()
    argv = [str(Path(sys.executable).with_name("vllm-router")), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    argv += ["--host", HOST, "--port", str(port), "--prometheus-port", str(free_port()), "--policy", "round_robin"]
    argv += ["--worker-startup-check-interval", "1"]
    argv += [word for engine in prefill for word in ("--prefill", engine.url)]
    argv += [word for engine in decode for word in ("--decode", engine.url)]
    return Router(f"http://{HOST}:{port}", guard.start(argv, env=os.environ, log=_fresh_log(logs, "router")))


def wait_ready(
    servers: Iterable[Server], *, timeout_s: float, watch: Callable[[StartUp], None] = lambda _: None
) -> None:
    """Wait until all servers answer; `ProgramError` with the end of the log for one that ended or came too late."""
    began = time.monotonic()
    waiting = {server.name: server for server in servers}
    stages = dict.fromkeys(waiting, "starting")
    while waiting:
        for name, server in list(waiting.items()):
            _check_alive(server)
            if answers(server.url):
                del waiting[name]
            stages[name] = server.stage() if name in waiting else "ready"
        seconds = time.monotonic() - began
        watch(StartUp(seconds, stages))
        if waiting and seconds > timeout_s:
            late = next(iter(waiting.values()))
            raise ProgramError(f"{late.name} was not ready after {timeout_s:.0f} s\n{_log_end(late)}")
        time.sleep(0.25)


def answers(url: str) -> bool:
    """Whether the server at this address says that it is healthy."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def read_metrics(url: str) -> dict[str, float]:
    """Every series of a Prometheus page, summed over its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        page = reply.read().decode()
    sums: dict[str, float] = {}
    for name, value in _samples(page):
        sums[name] = sums.get(name, 0.0) + value
    return sums


def _samples(page: str) -> Iterator[tuple[str, float]]:
    for found in re.finditer(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)$", page, re.MULTILINE):
        yield found[1], float(found[2])


def free_port() -> int:
    """A port of this machine that nobody listens on and that we have not given out before."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            if port not in _given_ports and probe.connect_ex((HOST, port)) != 0:
                _given_ports.add(port)
                return port


_given_ports: set[int] = set()


def _check_alive(server: Server) -> None:
    code = server.program.exit_code()
    if code is not None:
        raise ProgramError(f"{server.name} ended with exit code {code} before it was ready\n{_log_end(server)}")


def _log_end(server: Server) -> str:
    log = server.program.log
    return f"--- the end of {log} ---\n{server.program.log_tail()}\n--- the end of {log} ---"


def _fresh_log(logs: Path, name: str) -> Path:
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.log"
    log.write_text("")
    return log
