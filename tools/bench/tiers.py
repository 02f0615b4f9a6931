"""Prompts that come again after the device has forgotten them, on a CPU: host tier beside no connector, A B B A.

In:  pairs of turns, the length of a prompt in tokens, how many prompts a turn asks at each share of hits.
Out: a table of medians and spreads; `results/tiers.jsonl` gets the last line, one JSON object: `ours` and `theirs` in
     seconds to the first token, by the share of the prompt that was asked before; `ratio` is the worst of
     theirs / ours; `spread`: half of the range between the quartiles of the pairs' ratios.
Law: two engines, alike but for the connector, started before the first turn; one is asked at a time, and both are asked
     the same prompts. The device holds one prompt of a thousand tokens, and one is asked between the first time and the
     second, so that without a connector nothing comes from a cache, which is checked in every call. Ours loads if it
     thinks that this pays, by what it has measured itself; how much that was is printed.

    python tools/bench/tiers.py [--pairs 9] [--tokens 900] [--calls 3]
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Final

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from model.make_tiny import make_tiny
from turns import Figures, prompt, tell

from kv_engine_adapter.cli.engines import Engine, EngineConfig, start_engine, wait_ready
from kv_engine_adapter.cli.processes import ProcessGuard

RESULTS = Path(__file__).parent / "results" / "tiers.jsonl"
OURS, THEIRS = ARMS = ("tiers", "no connector")
SHARES: Final = (0.0, 0.5, 1.0)
START_S, CALL_S = 480.0, 120.0
BLOCK, NUM_BLOCKS, FLOOD_TOKENS = 32, 33, 1000
HOST_BYTES = 1 << 28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--calls", type=int, default=3)
    options = parser.parse_args()
    pairs = []
    # Why one client: a new one needs 30 ms to begin with.
    with (
        ProcessGuard() as guard,
        tempfile.TemporaryDirectory(prefix="kvferry-bench-") as logs,
        httpx.Client(timeout=CALL_S) as client,
    ):
        engines = started(guard, Path(logs))
        # The first pair, which warms up, is not among those that count.
        for number in range(options.pairs + 1):
            order = ARMS if number % 2 else ARMS[::-1]
            pairs.append({name: turn(client, engines[name], options, seed=number) for name in order})
            print(f"pair {number}: {pairs[-1]}", flush=True)
    claim = "time to first token of prompts that come again, with a host tier on a CPU, against no connector"
    tell(claim, pairs[1:], ARMS, sooner, RESULTS, tokens=options.tokens, calls=options.calls)


def started(guard: ProcessGuard, logs: Path) -> dict[str, Engine]:
    """Both engines, on the same core."""
    model = make_tiny()
    engines = {
        name: start_engine(
            guard,
            EngineConfig(
                name=name.replace(" ", "-"),
                model=model,
                cores=("0",),
                connector="FerryConnector" if name == OURS else None,
                connector_options={"tier_host_bytes": HOST_BYTES},
                tokens_per_block=BLOCK,
                num_blocks=NUM_BLOCKS,
                extra_arguments=("--enable-prompt-tokens-details",),
            ),
            logs,
        )
        for name in ARMS
    }
    wait_ready(engines.values(), timeout_s=START_S)
    return engines


def turn(client: httpx.Client, engine: Engine, options: argparse.Namespace, seed: int) -> Figures:
    """One engine, asked what the other one is asked too."""
    is_ours = engine.config.connector is not None
    dice = random.Random(seed)
    asked = [(share, prompt(dice, options.tokens)) for share in SHARES for _ in range(options.calls)]
    for share, tokens in asked:
        if share:
            first_token(client, engine, tokens[: round(share * len(tokens))])
    first_token(client, engine, prompt(dice, FLOOD_TOKENS))
    # Why shuffled: what is still copied of the prompt before costs the next one, and none more than others.
    dice.shuffle(asked)
    seconds: dict[float, list[float]] = {share: [] for share in SHARES}
    loaded: dict[float, list[float]] = {share: [] for share in SHARES}
    for share, tokens in asked:
        took, num_cached = first_token(client, engine, tokens)
        most = share * len(tokens) if is_ours else 0
        if num_cached > most:
            raise SystemExit(
                f"{engine.name}: {num_cached} tokens from a cache, of {most} at most: {engine.program.log}"
            )
        loaded[share].append(num_cached / len(tokens))
        seconds[share].append(took)
    print(
        engine.name,
        "loaded",
        {f"{share:.0%} hits": round(mean(parts), 3) for share, parts in loaded.items()},
        flush=True,
    )
    return {f"first token at {share:.0%} hits": round(median(taken), 4) for share, taken in seconds.items()}


def first_token(client: httpx.Client, engine: Engine, tokens: Sequence[int]) -> tuple[float, int]:
    """Seconds until the first token, and how many tokens of the prompt came from a cache."""
    body = {"model": "tiny", "prompt": list(tokens), "max_tokens": 1, "temperature": 0.0}
    began = time.perf_counter()
    reply = client.post(f"{engine.url}/v1/completions", json=body)
    took = time.perf_counter() - began
    reply.raise_for_status()
    details = reply.json()["usage"].get("prompt_tokens_details") or {}
    return took, details.get("cached_tokens") or 0


def sooner(what: str, ours: float, theirs: float) -> float:  # noqa: ARG001
    """How much sooner ours is: above 1 it is."""
    return theirs / ours


if __name__ == "__main__":
    main()
