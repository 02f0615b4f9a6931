"""Hand-over between two vLLM engines: ours, directly and staged, and vLLM's own NIXL connector, in one run.

In:  two GPUs of one host (or a CPU, with --device cpu), a model's folder; random weights unless --weights auto.
Out: for each connector and prompt length the time to the first token on the decode engine, less that of a decode step;
     `results/handover.csv`; a JSON line.
Law: every prompt is new to both engines; the first of each length warms up and is not counted. A hand-over whose first
     token differs from the prefill engine's is counted as a mismatch (random weights make ties likely).

    python tools/bench/handover.py --model DIR [--connectors direct staged nixl] [--lengths 1024 4096 15000]
"""

import argparse
import csv
import json
import multiprocessing as mp
import os
import random
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
CONNECTORS: dict[str, dict[str, Any]] = {
    "direct": {"kv_connector": "FerryConnector"},
    "staged": {"kv_connector": "FerryConnector", "kv_connector_extra_config": {"direct": False}},
    "nixl": {"kv_connector": "NixlConnector"},
}
ASKED_FOR = {"do_remote_decode": True, "do_remote_prefill": False}
OURS = "kv_engine_adapter.vllm.connector"
START_S = 600.0


@dataclass(frozen=True)
class Row:
    """Medians of one connector at one length, in milliseconds."""

    commit: str
    gpu: str
    connector: str
    tokens: int
    prefill_ms: float
    handover_ms: float
    recompute_ms: float
    step_ms: float
    mismatches: int

    @property
    def transfer_ms(self) -> float:
        """What the hand-over costs beyond the step that makes its token."""
        return round(max(self.handover_ms - self.step_ms, 0.01), 2)


def serve(pipe: Connection, number: int, connector: str, options: argparse.Namespace) -> None:
    """One engine: answers (tokens, parameters) with (first token, parameters, seconds), until it is told None."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + 100 * number),
        "VLLM_CPU_OMP_THREADS_BIND": str(number),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if options.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    settings = CONNECTORS[connector] | {"kv_role": "kv_both", "kv_buffer_device": options.device}
    if settings["kv_connector"] == "FerryConnector":
        settings["kv_connector_module_path"] = OURS
    longest = max(options.lengths) + 64
    engine = LLM(
        model=str(options.model),
        load_format=options.weights,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        block_size=options.block_size,
        gpu_memory_utilization=0.8,
        dtype=options.dtype,
        kv_transfer_config=KVTransferConfig(**settings),
    )
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        tokens, parameters = asked
        extra = {"kv_transfer_params": parameters} if parameters else None
        sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True, extra_args=extra)
        start = time.perf_counter()
        answer = engine.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)[0]
        pipe.send((answer.outputs[0].token_ids[0], answer.kv_transfer_params, time.perf_counter() - start))


class Engines:
    """A prefill and a decode engine with one connector."""

    def __init__(self, connector: str, options: argparse.Namespace) -> None:
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for number in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, number, connector, options))
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            if not pipe.poll(START_S) or pipe.recv() != "ready":
                raise RuntimeError(f"an engine with {connector} did not start within {START_S} s")

    def ask(self, number: int, tokens: list[int], parameters: dict[str, Any] | None = None) -> Any:
        self._pipes[number].send((tokens, parameters))
        return self._pipes[number].recv()

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join(30)
            process.kill()


def measure(engines: Engines, connector: str, length: int, options: argparse.Namespace, where: tuple[str, str]) -> Row:
    """One line of the table."""
    dice, found, mismatches = random.Random(length), [], 0
    for _ in range(options.rounds + 1):
        tokens, fresh = ([dice.randrange(3, options.vocabulary) for _ in range(length)] for _ in range(2))
        first, parameters, prefill_s = engines.ask(0, tokens, ASKED_FOR)
        again, _, handover_s = engines.ask(1, tokens, parameters)
        _, _, step_s = engines.ask(1, tokens)
        _, _, recompute_s = engines.ask(1, fresh)
        mismatches += first != again
        found.append((prefill_s, handover_s, recompute_s, step_s))
    columns = zip(*found[1:], strict=True)
    prefill, handover, recompute, step = (round(1e3 * statistics.median(column), 2) for column in columns)
    return Row(*where, connector, length, prefill, handover, recompute, step, mismatches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model; nothing is measured without one")
    parser.add_argument("--weights", default="dummy", help="vLLM's load_format (default dummy: random)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--connectors", nargs="+", default=list(CONNECTORS), choices=CONNECTORS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 15000])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.model is None:
        print("not measured: this benchmark needs two GPUs and a model: --model DIR")
        return
    where, rows = (_commit(), _gpu(options.device)), []
    for connector in options.connectors:
        engines = Engines(connector, options)
        try:
            for length in options.lengths:
                rows.append(measure(engines, connector, length, options, where))
                print(
                    f"{connector:8} {length:6} tokens: {rows[-1].transfer_ms:8.1f} ms beyond a step  {rows[-1]}",
                    flush=True,
                )
        finally:
            engines.close()
    report(rows, options.out)


def report(rows: list[Row], folder: Path) -> None:
    """Appends to the CSV and prints the JSON line: the longest prompt, ours against vLLM's own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "handover.csv"
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(asdict(rows[0])))
        if is_new:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    longest = max(row.tokens for row in rows)
    times = {row.connector: row.transfer_ms for row in rows if row.tokens == longest}
    ours, theirs = times.get("direct", times.get("staged")), times.get("nixl")
    ratio = round(theirs / ours, 2) if ours and theirs else None
    print(
        json.dumps(
            {"claim": "handover", "tokens": longest, "ours": ours, "theirs": theirs, "ratio": ratio, "ms": times}
        )
    )


def _commit() -> str:
    if known := os.environ.get("KVFERRY_COMMIT"):
        return known
    words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()


def _gpu(device: str) -> str:
    if device == "cpu":
        return "CPU"
    import torch

    return f"{torch.cuda.device_count()}x {torch.cuda.get_device_name()}"


if __name__ == "__main__":
    main()
