"""Hand-over between vLLM servers on a CPU: FerryConnector beside vLLM's NixlConnector, in turns A B B A.

In:  pairs of turns, prompt lengths in tokens, how many calls go at once for the throughput.
Out: a table of medians and spreads; `results/connectors.jsonl` gets the last line, one JSON object: `ours` and `theirs`
     in seconds (time to first token, by prompt length) and calls a second; `ratio` is the worst of theirs / ours of the
     times and ours / theirs of the throughput; `spread`: half of the range between the quartiles of the pairs' ratios.
Law: both have a prefill and a decode engine of their own, alike but for the connector, all started before the first
     turn; only one connector is asked at a time, and both are asked the same prompts, which no engine has seen.

The time to first token is that of two calls, one after the other, as a router makes them: prefill on one engine, then
one token from the other.

    python tools/bench/connectors.py [--pairs 9] [--tokens 100 900] [--at-once 16]
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from model.make_tiny import make_tiny
from turns import Figures, prompt, tell

from kv_engine_adapter.cli.engines import Engine, EngineConfig, start_engine, wait_ready
from kv_engine_adapter.cli.processes import ProcessGuard

RESULTS = Path(__file__).parent / "results" / "connectors.jsonl"
CONNECTORS: Final = ("FerryConnector", "NixlConnector")
WANTS_HAND_OVER: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
START_S, CALL_S = 480.0, 120.0
NUM_ANSWER_TOKENS = 8


@dataclass(frozen=True)
class Arm:
    """One connector: the engine that computes prompts, and the one that answers."""

    prefill: Engine
    decode: Engine

    async def call(self, client: httpx.AsyncClient, prompt: Sequence[int], num_tokens: int) -> float:
        """Seconds of a hand-over and this many tokens of its answer."""
        began = time.perf_counter()
        asked = {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": WANTS_HAND_OVER}
        params = (await self._post(client, self.prefill, prompt, asked))["kv_transfer_params"]
        await self._post(client, self.decode, prompt, {"max_tokens": num_tokens, "kv_transfer_params": params})
        return time.perf_counter() - began

    async def _post(
        self, client: httpx.AsyncClient, engine: Engine, prompt: Sequence[int], more: Mapping[str, object]
    ) -> dict[str, object]:
        body = {"model": "tiny", "prompt": list(prompt), "temperature": 0.0, "ignore_eos": True, **more}
        reply = await client.post(f"{engine.url}/v1/completions", json=body)
        reply.raise_for_status()
        return dict(reply.json())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, nargs="+", default=[100, 900])
    parser.add_argument("--at-once", type=int, default=16)
    options = parser.parse_args()
    with ProcessGuard() as guard, tempfile.TemporaryDirectory(prefix="kvferry-bench-") as logs:
        arms = started(guard, Path(logs))
        turns = asyncio.run(measured(arms, options))
    claim = "hand-over between vLLM servers on a CPU, against NixlConnector"
    tell(claim, turns, CONNECTORS, better, RESULTS, at_once=options.at_once)


def started(guard: ProcessGuard, logs: Path) -> dict[str, Arm]:
    """Both connectors, two engines each."""
    model = make_tiny()
    engines = {
        (connector, role): start_engine(
            guard, EngineConfig(name=f"{connector}-{role}", model=model, cores=(core,), connector=connector), logs
        )
        for connector in CONNECTORS
        for role, core in (("prefill", "0"), ("decode", "1"))
    }
    wait_ready(engines.values(), timeout_s=START_S)
    return {connector: Arm(engines[connector, "prefill"], engines[connector, "decode"]) for connector in CONNECTORS}


async def measured(arms: Mapping[str, Arm], options: argparse.Namespace) -> list[dict[str, Figures]]:
    """Each pair of turns, by connector; the first pair, which meets and warms up, is not among them."""
    pairs = []
    async with httpx.AsyncClient(timeout=CALL_S) as client:
        for number in range(options.pairs + 1):
            order = CONNECTORS if number % 2 else CONNECTORS[::-1]
            pairs.append({name: await turn(client, arms[name], options, seed=number) for name in order})
            print(f"pair {number}: {pairs[-1]}", flush=True)
    return pairs[1:]


async def turn(client: httpx.AsyncClient, arm: Arm, options: argparse.Namespace, seed: int) -> Figures:
    """One connector, asked what the other one is asked too."""
    dice, figures = random.Random(seed), Figures()
    for num_tokens in options.tokens:
        seconds = [await arm.call(client, prompt(dice, num_tokens), 1) for _ in range(3)]
        figures[f"first token of {num_tokens}"] = round(median(seconds), 4)
    prompts = [prompt(dice, dice.randint(1, max(options.tokens))) for _ in range(options.at_once)]
    began = time.perf_counter()
    await asyncio.gather(*(arm.call(client, each, NUM_ANSWER_TOKENS) for each in prompts))
    figures["calls a second"] = round(options.at_once / (time.perf_counter() - began), 3)
    return figures


def better(what: str, ours: float, theirs: float) -> float:
    """How much better ours is: above 1 it is."""
    return ours / theirs if what == "calls a second" else theirs / ours


if __name__ == "__main__":
    main()
