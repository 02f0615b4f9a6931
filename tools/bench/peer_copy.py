"""The direct path: one kernel reads a paged cache of another process's GPU into blocks of our own.

In:  two GPUs of one host; each process sees one of them only.
Out: payload in GB/s for equal and for re-laid caches, `results/peer_copy.csv`.
Law: the reader proves every case bit by bit against the same caches made on its own GPU, before it is timed.

    python tools/bench/peer_copy.py [--sweep] [--out FOLDER]
"""

import argparse
import ctypes
import multiprocessing as mp
import os
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# (case, (order, tokens per block, heads) of ours, of the peer's, heads copied, first head of ours, GB/s to be reached)
CASES = [
    ("same layout", ("BHTD", 16, 8), ("BHTD", 16, 8), 8, 0, 365.0),
    ("same layout, token-major", ("BTHD", 16, 8), ("BTHD", 16, 8), 8, 0, 365.0),
    ("TP 2 to 1", ("BHTD", 16, 8), ("BHTD", 16, 4), 4, 4, 345.0),
    ("TP 2 to 1, token-major (1 KiB)", ("BTHD", 16, 8), ("BTHD", 16, 4), 4, 4, 345.0),
    ("TP 1 to 2", ("BHTD", 16, 4), ("BHTD", 16, 8), 4, 0, 345.0),
    ("16 to 64", ("BHTD", 64, 8), ("BHTD", 16, 8), 8, 0, 345.0),
    ("64 to 16", ("BHTD", 16, 8), ("BHTD", 64, 8), 8, 0, 345.0),
    ("head-major to token-major", ("BTHD", 16, 8), ("BHTD", 16, 8), 8, 0, 345.0),
]


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


def driver_call(name: str, *arguments: Any) -> None:
    """Calls the CUDA driver; RuntimeError with its number if it refuses."""
    result = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if result:
        raise RuntimeError(f"{name} failed: CUresult={result}")


def export(address: int) -> tuple[bytes, int]:
    """(handle of the allocation that `address` lies in, where that begins)."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), IpcHandle()
    driver_call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    driver_call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle), base.value


def open_handle(handle: bytes) -> int:
    """Where the peer's allocation is mapped in this process."""
    address = ctypes.c_uint64()
    driver_call("cuIpcOpenMemHandle_v2", ctypes.byref(address), IpcHandle.from_buffer_copy(handle), ctypes.c_uint(1))
    return address.value


def close_handle(address: int) -> None:
    driver_call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def make_caches(kind: tuple[str, int, int], seed: int) -> list[Any]:
    """The peer's planes; equal on every GPU for equal arguments."""
    import torch
    from gpu_rows import planes_of

    torch.manual_seed(seed)
    order, block, heads = kind
    planes: list[Any] = planes_of(order, block, heads, held=TOKENS_HELD)
    return planes


TOKENS_HELD = 20480
"""So that 16,384 tokens of 4 heads, 1 GiB, lie in random blocks."""


def owner(gpu: str, pipe: Connection) -> None:
    """Holds the caches asked for, one after another, until told to stop."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    from kv_kernels.layout import MappedPlanes

    while (asked := pipe.recv()) is not None:
        planes = make_caches(*asked)
        torch.cuda.synchronize()
        handle, base = export(planes[0].data_ptr())
        pipe.send((handle, MappedPlanes.of(planes, -base)))
        pipe.recv()
        del planes
        torch.cuda.empty_cache()
        pipe.send("freed")


def reader(gpu: str, pipe: Connection, sweep: bool, out: Path) -> None:
    """Reads, proves and times every case."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch
    from gpu_rows import Table, device_copy

    table = Table("peer_copy")
    device_copy(table)
    for seed, case in enumerate(CASES):
        pipe.send((case[2], seed))
        handle, remote = pipe.recv()
        mapped = open_handle(handle)
        run_case(table, case, seed, remote, mapped, sweep)
        torch.cuda.synchronize()
        close_handle(mapped)
        pipe.send("closed")
        pipe.recv()
        torch.cuda.empty_cache()
    pipe.send(None)
    table.finish(out)


def run_case(table: Any, case: Any, seed: int, remote: Any, mapped: int, sweep: bool) -> None:
    """One line for each tuning."""
    from dataclasses import replace

    import torch
    from gpu_rows import ids_of, label, planes_of, seconds

    from kv_kernels import reference
    from kv_kernels.layout import Corner
    from kv_kernels.peer import peer_copy
    from kv_kernels.tuning import PEER, Tuning

    name, ours, theirs, heads, first_head, bar = case
    tokens = (1 << 30) // (64 * heads * 256)
    source = replace(remote, addresses=tuple(mapped + offset for offset in remote.addresses))
    planes = planes_of(*ours, held=TOKENS_HELD)
    twin = make_caches(theirs, seed)
    to, of = ids_of(planes, tokens), ids_of(twin, tokens)[::-1]
    window: Any = {"num_tokens": tokens, "num_heads": heads, "at": Corner(0, first_head)}
    expected = [plane.clone() for plane in planes[:4]]
    reference.copy_blocks(expected, to, twin[:4], of, **window)
    assert peer_copy(planes, to, source, of, **window).word_bytes == 16
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(planes, expected, strict=False))
    del twin, expected
    tunings = [PEER]
    if sweep:
        swept = [(2048, 4), (4096, 8)] if seed else list(product((1024, 2048, 4096), (4, 8)))
        tunings += [Tuning(w, n, programs) for w, n in swept for programs in (32, 64, 132, 264, 1056, None)]
    for tuning in dict.fromkeys(tunings):
        time = seconds(lambda t=tuning: peer_copy(planes, to, source, of, **window, tuning=t))
        gbps = 64 * tokens * heads * 256 / time / 1e9
        table.add(f"peer copy {name}", gbps, tuning=label(tuning), bar=bar if tuning == PEER else 0.0)


def main() -> None:
    import torch
    from gpu_rows import RESULTS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--gpus", default="0,1", help="of the owner and of the reader; equal: proves bits only")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if torch.cuda.device_count() < 2 and options.gpus == "0,1":
        print("not measured: this benchmark needs two GPUs of one host")
        return
    owners, readers = options.gpus.split(",")
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    processes = [
        context.Process(target=owner, args=(owners, theirs), daemon=True),
        context.Process(target=reader, args=(readers, ours, options.sweep, options.out), daemon=True),
    ]
    for process in processes:
        process.start()
    processes[1].join()
    processes[0].join(5)
    raise SystemExit(processes[1].exitcode)


if __name__ == "__main__":
    main()
