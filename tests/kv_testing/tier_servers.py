"""vLLM servers with tiers, asked over HTTP, and the published router in front of them that listens to their events.

In:  checkpoints, settings of the connector.
Out: answers, with how many tokens of the prompt came from a cache; the router's own counters.
Law: a device holds one prompt of a thousand tokens, so that asking for one (`flood`) leaves nothing else on it.
"""

import json
import os
import random
import re
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from kv_engine_adapter.cli.engines import (
    HOST,
    MODEL_NAME,
    Engine,
    EngineConfig,
    Router,
    free_port,
    start_engine,
    wait_ready,
)
from kv_engine_adapter.cli.processes import ProcessGuard
from kv_testing.answers import Answer, Prompt, Question, answers_of
from kv_testing.waiting import wait_for

BLOCK_TOKENS = 32
TOKEN_BYTES = 4096
"""Of the tiny model, all layers and heads."""
SLOT_BYTES = BLOCK_TOKENS * TOKEN_BYTES
COSTS = {"tier_recompute_token_s": 1.0, "tier_host_byte_s": 0.0, "tier_disk_byte_s": 0.0, "tier_start_s": 0.0}
"""Given, so that what is measured on a busy machine decides nothing."""
FLOOD_TOKENS = 1000
START_S, ANSWER_S = 480.0, 120.0
ORDINARY_TOKENS = range(16, 500)


class Reply(NamedTuple):
    """An answer, how many tokens of its prompt were not computed for it, and what a router hands on."""

    answer: Answer
    num_cached: int
    params: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class TierServer:
    """A server, and where it tells of its blocks."""

    engine: Engine
    event_port: int

    @property
    def url(self) -> str:
        return self.engine.url


def prompts(name: str, number: int, num_tokens: int) -> list[Prompt]:
    """Prompts that nobody else asks."""
    dice = random.Random(name)
    return [tuple(dice.choice(ORDINARY_TOKENS) for _ in range(num_tokens)) for _ in range(number)]


def start_tier_servers(
    guard: ProcessGuard, logs: Path, model: Path, settings: Mapping[str, Mapping[str, Any]], **more: Mapping[str, Any]
) -> dict[str, TierServer]:
    """Servers by name, each with its settings of the connector; `more` are fields of their `EngineConfig`."""
    ports = {name: free_port() for name in settings}
    engines = {
        name: start_engine(guard, _config(name, model, options, ports[name], more.get(name, {})), logs)
        for name, options in settings.items()
    }
    wait_ready(engines.values(), timeout_s=START_S)
    servers = {name: TierServer(engine, ports[name]) for name, engine in engines.items()}
    for server in servers.values():
        ask(server.url, (16, 17), 1)  # the first computation takes seconds
    return servers


def start_kv_router(guard: ProcessGuard, logs: Path, servers: Sequence[TierServer]) -> tuple[Router, str]:
    """The router in regular mode, which sends a prompt where its prefix is; and the address of its counters."""
    port, counters = free_port(), free_port()
    argv = [str(Path(sys.executable).with_name("vllm-router")), "--host", HOST, "--port", str(port)]
    argv += ["--policy", "kv_aware", "--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", MODEL_NAME]
    argv += ["--worker-startup-check-interval", "1", "--prometheus-port", str(counters)]
    argv += ["--worker-urls", *(server.url for server in servers)]
    for server in servers:
        argv += ["--kv-event-source", f"{server.url}=tcp://{HOST}:{server.event_port}"]
    log = logs / "router.log"
    router = Router(f"http://{HOST}:{port}", guard.start(argv, env=os.environ, log=log))
    wait_ready([router], timeout_s=START_S)
    return router, f"http://{HOST}:{counters}"


def ask(url: str, prompt: Prompt, num_tokens: int = 8, **more: Any) -> Reply:
    """One prompt, as its token ids; `more` is the rest of the body. An error of HTTP is an exception."""
    found = _post(url, Question((prompt,), num_tokens).body() | {"prompt": list(prompt)} | more)
    (answer,) = answers_of(found)
    return Reply(answer, _num_cached(found), found.get("kv_transfer_params"))


def ask_plainly(url: str, prompt: Prompt, num_tokens: int = 8, **more: Any) -> tuple[str, int]:
    """The text of an answer, and how many tokens of the prompt were not computed for it.

    Why without more: a router (0.1.17) looks for the prefix only of what it knows to leave the prompt as it is, and so
    not of calls that want token ids back or have `vllm_xargs`.
    """
    usual = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0.0}
    found = _post(url, usual | {"ignore_eos": True} | more)
    return str(found["choices"][0]["text"]), _num_cached(found)


def _post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    reply = httpx.post(f"{url}/v1/completions", json=dict(body), timeout=ANSWER_S)
    reply.raise_for_status()
    return dict(reply.json())


def _num_cached(reply: Mapping[str, Any]) -> int:
    return int((reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def flood(url: str, name: str, number: int = 1) -> None:
    """Ask for what fills the device, so often."""
    for prompt in prompts(f"flood {name}", number, FLOOD_TOKENS):
        assert ask(url, prompt, 1).num_cached < BLOCK_TOKENS


def settle(server: TierServer, timeout_s: float = 60.0) -> None:
    """Wait until its tiers have nothing to do."""
    wait_for(lambda: ask(server.url, (16, 17), 1) and not server.engine.metrics()["kvferry:tier_jobs"], timeout_s)


def counter(address: str, name: str) -> dict[str, float]:
    """The series of one counter by their labels."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as reply:
        page = reply.read().decode()
    return {found[1]: float(found[2]) for found in re.finditer(rf"^{name}\{{(.*)\}} (\S+)$", page, re.MULTILINE)}


def _config(
    name: str, model: Path, options: Mapping[str, Any], event_port: int, more: Mapping[str, Any]
) -> EngineConfig:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{event_port}"}
    arguments = ("--enable-scale-out", "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events))
    usual: dict[str, Any] = {"num_blocks": 33, "tokens_per_block": BLOCK_TOKENS}
    extra = (*arguments, *more.get("extra_arguments", ()))
    return EngineConfig(
        name=name,
        model=model,
        connector_options=COSTS | dict(options),
        **(usual | dict(more) | {"extra_arguments": extra}),
    )
