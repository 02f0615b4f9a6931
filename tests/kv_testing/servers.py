"""A fleet of real engines that tests share: started together, used by many, brought back when a test has killed one.

In:  a transport, the tiny models, a folder for logs and hooks.
Out: named engines: P1, P2 prefill and D1, D2 decode (the digit is the number of tensor ranks), X1 with other weights,
     C1 prefill that computes a prompt in many steps.
Law: one fleet runs at a time, and nothing of it outlives the tests, however they end.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from environment.vllm_builds import environment_of

from kv_engine_adapter.cli.engines import (
    MODEL_NAME,
    Engine,
    EngineConfig,
    Router,
    StartUp,
    start_engine,
    start_router,
    wait_ready,
)
from kv_engine_adapter.cli.processes import ProcessGuard
from kv_transfer.config import TransferConfig

TOKENS_PER_BLOCK = 32
NUM_BLOCKS = 256
MAX_PROMPT_TOKENS = 1024
# What the engines run with, for they are started as an operator would start them.
LEASE_S = TransferConfig().lease_s
DEADLINE_S = TransferConfig().request_deadline_s
START_S = 480.0
WARM_UP_S = 120.0
TRANSPORTS: Mapping[str, Mapping[str, str]] = {
    "shm": {"UCX_LOG_LEVEL": "info"},
    "tcp": {"UCX_LOG_LEVEL": "info", "UCX_TLS": "tcp"},
}
"""UCX finds shared memory by itself; told to use TCP alone, two engines talk as if on two hosts. It logs its choice."""

SHARED_MEMORY_FIRST = pytest.mark.parametrize(
    "fleet", ["shm", pytest.param("tcp", marks=pytest.mark.long)], indirect=True, scope="session"
)
"""For tests of what does not depend on the transport: over TCP in the long version only."""

# Another connector shows whether a failure is the harness's or ours; tests that need our hooks are then left out.
CONNECTOR = os.environ.get("E2E_CONNECTOR", "FerryConnector")
IS_OURS = CONNECTOR == "FerryConnector"


@dataclass(frozen=True, slots=True)
class Role:
    """What distinguishes one engine of the fleet."""

    model: str
    tensor_ranks: int
    cores: tuple[str, ...]
    load_failure_policy: str = "recompute"
    extra_arguments: tuple[str, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    """Of our connector."""
    vllm: str | None = None
    """The version it runs; the installed one if None."""
    environment: Mapping[str, str] = field(default_factory=dict)
    has_tiers: bool = False
    """It keeps prefixes in host memory and in the directory that all engines of the fleet share."""


TOKENS_PER_STEP = 128
"""Of C1."""

ROLES: Mapping[str, Role] = {
    "P1": Role("tiny", 1, ("0",)),
    "P2": Role("tiny", 2, ("0", "1")),
    "D1": Role("tiny", 1, ("1",), "recompute"),
    "D2": Role("tiny", 2, ("0", "1"), "fail"),
    "X1": Role("other", 1, ("1",)),
    "C1": Role("tiny", 1, ("0",), extra_arguments=("--max-num-batched-tokens", str(TOKENS_PER_STEP))),
}
# oneDNN keeps code for each number of tokens in a step: with its 1,024 an engine without any connector grew by 540 MiB
# in 1,084 prompts, with 8 by 123 in 583, nearly all of it in the first 220, so what else grows is seen. It is slower.
_FEW_SIZES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
CHAOS_ROLES: Mapping[str, Role] = {
    f"{kind}{letter}1": Role("tiny", 1, (core,), has_tiers=kind == "T", environment=_FEW_SIZES)
    for kind in "VT"
    for letter, core in {"P": "0", "Q": "0", "D": "1", "E": "1"}.items()
}
"""Two prefill (P, Q) and two decode engines (D, E) whose memory is watched, without (V) and with tiers (T); devices of
the latter hold five of the longest prompts they are asked."""
TIER_BLOCKS = 80
TIER_DISK_BYTES = 96 << 20
TIER_OPTIONS: Mapping[str, object] = {
    "tier_host_bytes": 32 << 20,
    "tier_disk_bytes": TIER_DISK_BYTES,
    # Given, so that what is measured on a busy machine decides nothing.
    "tier_recompute_token_s": 1.0,
    "tier_host_byte_s": 0.0,
    "tier_disk_byte_s": 0.0,
    "tier_start_s": 0.0,
}
# Prompts are computed in several steps, so that windows move on before the end.
_IN_STEPS = ("--max-num-batched-tokens", "128")
_CONVERTS = {"convert_elements": True}
_ALL_KEPT = ("--disable-hybrid-kv-cache-manager",)
# The last one counts: ours as a child of vLLM's connector of several.
_CHILD = {"kv_connector": "FerryConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
_UNDER_MULTI = (
    "--kv-transfer-config",
    json.dumps(_CHILD | {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [_CHILD]}}),
)
GROUP_ROLES: Mapping[str, Role] = {
    "HP1": Role("hybrid", 1, ("0",), extra_arguments=_IN_STEPS),
    "HD1": Role("hybrid", 1, ("1",)),
    "HP2": Role("hybrid", 2, ("0", "1"), extra_arguments=_IN_STEPS),
    "HD2": Role("hybrid", 2, ("0", "1")),
    "WP1": Role("windows", 1, ("0",), extra_arguments=_IN_STEPS),
    "WD1": Role("windows", 1, ("1",)),
    "CP1": Role("chunks", 1, ("0",), extra_arguments=_IN_STEPS),
    "CD1": Role("chunks", 1, ("1",)),
    "MP1": Role("hybrid", 1, ("0",), extra_arguments=(*_IN_STEPS, *_UNDER_MULTI)),
    "MD1": Role("hybrid", 1, ("1",), extra_arguments=_UNDER_MULTI),
    "NP1": Role("hybrid", 1, ("0",), extra_arguments=(*_IN_STEPS, *_ALL_KEPT)),
    "ND1": Role("hybrid", 1, ("1",), extra_arguments=_ALL_KEPT),
    "LP1": Role("latent", 1, ("0",)),
    "LD1": Role("latent", 1, ("1",)),
    "LP2": Role("latent", 2, ("0", "1")),
    "LD2": Role("latent", 2, ("0", "1")),
    "KP1": Role("codes", 1, ("0",), extra_arguments=("--kv-cache-dtype", "fp8_e4m3", *_IN_STEPS)),
    # Its checkpoint says that it keeps codes.
    "KD1": Role("codes", 1, ("1",)),
    "XK1": Role("rescaled", 1, ("0",), extra_arguments=("--kv-cache-dtype", "fp8_e4m3")),
    "EP1": Role("rescaled", 1, ("0",), options=_CONVERTS),
    "ED1": Role("codes", 1, ("1",), options=_CONVERTS),
    "EN1": Role("tiny", 1, ("0",), options=_CONVERTS),
    "EC1": Role("tiny", 1, ("1",), extra_arguments=("--kv-cache-dtype", "fp8"), options=_CONVERTS),
}
"""Engines of models with other cache groups: hybrid (H), under MultiConnector (M), with all tokens kept (N), windows
alone (W), local chunks (C), latent attention (L), a cache of codes (K); XK1 has other scales; E convert."""
OLDER = "0.27.0"
"""The oldest vLLM that runs on the torch of the installed one."""
OLDER_ROLES: Mapping[str, Role] = {
    "OP1": Role("tiny", 1, ("0",), vllm=OLDER),
    "OD1": Role("tiny", 1, ("1",), vllm=OLDER),
}


@dataclass(slots=True)
class Fleet:
    """The engines that run now."""

    transport: str
    models: Mapping[str, Path]
    folder: Path
    guard: ProcessGuard
    engines: dict[str, Engine] = field(default_factory=dict)
    router: Router | None = None

    def start(self, names: Sequence[str]) -> None:
        """Start engines together, and wait for all of them."""
        started = {name: start_engine(self.guard, self._config(name), self.folder) for name in names}
        wait_ready(started.values(), timeout_s=START_S, watch=_report())
        with ThreadPoolExecutor() as pool:
            list(pool.map(_warm_up, started.values()))
        self.engines |= started

    def engine(self, name: str) -> Engine:
        """The engine of this name, started (again) if it does not run."""
        engine = self.engines.get(name)
        if engine is None or engine.program.exit_code() is not None:
            self.start([name])
        return self.engines[name]

    def lose(self, name: str) -> None:
        """This engine is meant to be dead; it is started again when somebody asks for it."""
        self.engines.pop(name).program.kill()

    def restart(self, name: str) -> None:
        """Another run of an engine that has ended, at the same address."""
        reborn = start_engine(self.guard, self.engines[name].reborn(), self.folder)
        wait_ready([reborn], timeout_s=START_S)
        self.engines[name] = reborn

    @property
    def disk(self) -> Path:
        """What engines with tiers share."""
        return self.folder / "kept"

    def hooks(self, name: str) -> Path:
        """Where this engine looks for faults."""
        folder = self.folder / f"hooks-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def routed(self) -> str:
        """The address of a router in front of P2 and D1."""
        if self.router is None:
            self.router = start_router(self.guard, [self.engine("P2")], [self.engine("D1")], self.folder)
            wait_ready([self.router], timeout_s=START_S)
        return self.router.url

    def check(self) -> None:
        """Every engine that should run does: a test that passed has not quietly lost one."""
        gone = {name: code for name, engine in self.engines.items() if (code := engine.program.exit_code()) is not None}
        assert not gone, f"engines have ended (name: exit code): {gone}; logs in {self.folder}"

    def _config(self, name: str) -> EngineConfig:
        role = {**ROLES, **CHAOS_ROLES, **GROUP_ROLES, **OLDER_ROLES}[name]
        tiers = {**TIER_OPTIONS, "tier_disk_dir": str(self.disk)} if role.has_tiers else {}
        return EngineConfig(
            name=name,
            model=self.models[role.model],
            tensor_ranks=role.tensor_ranks,
            cores=role.cores,
            connector=CONNECTOR,
            connector_options={"test_hooks_dir": str(self.hooks(name)), **tiers, **role.options} if IS_OURS else {},
            load_failure_policy=role.load_failure_policy,
            tokens_per_block=TOKENS_PER_BLOCK,
            num_blocks=TIER_BLOCKS if role.has_tiers else NUM_BLOCKS,
            max_prompt_tokens=MAX_PROMPT_TOKENS,
            extra_arguments=role.extra_arguments,
            environment={**role.environment, **TRANSPORTS[self.transport], **environment_of(role.vllm)},
        )


@contextmanager
def running_fleet(
    transport: str, models: Mapping[str, Path], folder: Path, names: Iterable[str] = ROLES
) -> Iterator[Fleet]:
    """A fleet with these engines up; the others start when they are asked for."""
    with ProcessGuard() as guard:
        fleet = Fleet(transport, models, folder, guard)
        fleet.start(sorted(names))
        yield fleet


def wait_until(holds: Callable[[], bool], *, timeout_s: float, period_s: float = 0.25) -> float:
    """The seconds until something held; infinity if it did not within the time."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > timeout_s:
            return float("inf")
        time.sleep(period_s)
    return time.monotonic() - began


def _warm_up(engine: Engine) -> None:
    """Let the first computation, which takes seconds, be nobody's hand-over."""
    body = {"model": MODEL_NAME, "prompt": [16], "max_tokens": 2}
    httpx.post(f"{engine.url}/v1/completions", json=body, timeout=WARM_UP_S).raise_for_status()


def _report() -> Callable[[StartUp], None]:
    """A line whenever an engine gets further in its start, so that a slow start is seen to move."""
    shown: dict[str, str] = {}

    def watch(now: StartUp) -> None:
        for name, stage in now.stages.items():
            if shown.get(name) != stage:
                shown[name] = stage
                print(f"[{now.seconds:6.1f} s] {name}: {stage}", file=sys.stderr, flush=True)

    return watch
