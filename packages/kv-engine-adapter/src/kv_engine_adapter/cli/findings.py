"""What a host's facts mean for an engine with FerryConnector.

In:  a `Host`, and the connector's settings.
Out: findings: what was looked at, what it is, whether that is well, and what to do if it is not.
Law: pure, but for a look at the key file. Whatever keeps an engine from starting or from handing over is BAD; what
     makes it slow or narrow is a HINT.
"""

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kv_core.errors import CallerError
from kv_engine_adapter.cli.host import Host
from kv_engine_adapter.config import FerryConfig

OLDEST_VLLM, NEWEST_VLLM, NAMES_REQUESTS = (0, 25), (0, 33), (0, 30)
LEAST_PYTHON: Final = (3, 11)
MIN_FILES: Final = 4096
"""A door, a socket and several NIXL endpoints for each rank of each peer, beside what an engine opens."""
MIN_SHARED_MEMORY: Final = 1 << 30
MIN_DISK: Final = 10 << 30
PLUGIN: Final = "kvferry"


class Level(enum.Enum):
    """How well it is."""

    GOOD = "ok"
    HINT = "hint"
    BAD = "BAD"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `advice` says what to do, unless it is good."""

    level: Level
    subject: str
    found: str
    advice: str = ""


def findings(host: Host, config: FerryConfig) -> list[Finding]:
    """All of them, in the order in which an engine would stumble over them."""
    parts = (_python, _packages, _plugin, _nixl, _memory, _limits, _gpus, _ports, _disk)
    return [finding for part in parts for finding in part(host)] + list(_key(config))


def _python(host: Host) -> Iterator[Finding]:
    found = ".".join(map(str, host.python))
    is_good = host.python[:2] >= LEAST_PYTHON
    yield Finding(Level.GOOD if is_good else Level.BAD, "Python", found, "" if is_good else "install 3.11 or newer")


def _packages(host: Host) -> Iterator[Finding]:
    for name, found in host.versions.items():
        if name == "vllm":
            yield _vllm(found)
        elif found is not None:
            yield Finding(Level.GOOD, name, found)
        elif name == "triton":
            level = Level.BAD if host.gpus else Level.GOOD
            yield Finding(level, name, "not installed", "pip install triton" if host.gpus else "")
        else:
            advice = "pip install 'kv-transfer[nixl]'" if name == "nixl" else f"pip install {name}"
            yield Finding(Level.BAD, name, "not installed", advice)


def _vllm(found: str | None) -> Finding:
    if found is None:
        return Finding(Level.BAD, "vllm", "not installed", "pip install 'kv-engine-adapter[vllm]'")
    number = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if not OLDEST_VLLM <= number <= NEWEST_VLLM:
        supported = "{}.{} to {}.{}".format(*OLDEST_VLLM, *NEWEST_VLLM)
        return Finding(Level.HINT, "vllm", found, f"supported are {supported}; run make test-compat for others")
    if number < NAMES_REQUESTS:
        advice = "models with several cache groups need 0.30: here failed loads cannot be named by request"
        return Finding(Level.HINT, "vllm", found, advice)
    return Finding(Level.GOOD, "vllm", found)


def _plugin(host: Host) -> Iterator[Finding]:
    allowed = host.environment.get("VLLM_PLUGINS")
    if PLUGIN not in host.plugin_names:
        advice = "reinstall kv-engine-adapter in the environment that runs vLLM"
        yield Finding(Level.BAD, "vLLM plugin", "not registered", advice)
    elif allowed is not None and PLUGIN not in allowed.split(","):
        advice = f'add {PLUGIN} to it, or set "kv_connector_module_path": "kv_engine_adapter.vllm.connector"'
        yield Finding(Level.BAD, "vLLM plugin", f"left out by VLLM_PLUGINS={allowed}", advice)
    else:
        yield Finding(Level.GOOD, "vLLM plugin", "registered")


def _nixl(host: Host) -> Iterator[Finding]:
    if host.nixl_gbps is None:
        advice = "unset UCX_TLS, or name transports that this host has (tcp always works)"
        yield Finding(Level.BAD, "NIXL over UCX", host.nixl_trouble, advice)
    else:
        yield Finding(Level.GOOD, "NIXL over UCX", f"moved 1 MiB at {host.nixl_gbps:.1f} GB/s")
    asked, adapters = host.environment.get("UCX_TLS"), ", ".join(host.adapters)
    if asked is not None and set(asked.split(",")) <= {"tcp", "self"} and adapters:
        advice = "unset UCX_TLS so that UCX uses the adapters"
        yield Finding(Level.HINT, "UCX transports", f"UCX_TLS={asked}, though there are {adapters}", advice)
    else:
        choice = "UCX chooses" if asked is None else f"UCX_TLS={asked}"
        yield Finding(Level.GOOD, "UCX transports", f"{choice}; adapters: {adapters or 'none'}")


def _memory(host: Host) -> Iterator[Finding]:
    if host.shared_memory_bytes is not None:
        found, is_good = _gib(host.shared_memory_bytes), host.shared_memory_bytes >= MIN_SHARED_MEMORY
        advice = "" if is_good else "give the container more (docker run --shm-size=1g or --ipc=host)"
        yield Finding(Level.GOOD if is_good else Level.HINT, "/dev/shm", found, advice)
    if host.ptrace_scope:
        advice = "sysctl kernel.yama.ptrace_scope=0, else engines of one host copy twice through shared memory"
        yield Finding(Level.HINT, "copies between processes", f"ptrace_scope={host.ptrace_scope}", advice)


def _limits(host: Host) -> Iterator[Finding]:
    is_good = host.max_files < 0 or host.max_files >= MIN_FILES
    advice = "" if is_good else f"ulimit -n {MIN_FILES}"
    yield Finding(Level.GOOD if is_good else Level.HINT, "open files", str(host.max_files), advice)
    if host.adapters and host.max_locked_bytes is not None:
        advice = "ulimit -l unlimited: adapters lock the memory that is registered"
        yield Finding(Level.BAD, "locked memory", _gib(host.max_locked_bytes), advice)


def _gpus(host: Host) -> Iterator[Finding]:
    if not host.gpus:
        yield Finding(Level.GOOD, "GPUs", "none: caches in host memory, staged path")
        return
    yield Finding(Level.GOOD, "GPUs", f"{len(host.gpus)} x {host.gpus[0].name}")
    cut = [f"{ours}>{it}" for ours, gpu in enumerate(host.gpus) for it in _others(host, ours) if it not in gpu.reaches]
    if cut:
        advice = (
            "between these caches are staged through NIXL; NVLink, or PCIe without ACS, would allow the direct path"
        )
        yield Finding(Level.HINT, "GPU peer access", f"none for {', '.join(cut)}", advice)
    elif len(host.gpus) > 1:
        yield Finding(Level.GOOD, "GPU peer access", "every GPU maps every other one")
    settings = ",".join(host.environment.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if "expandable_segments:true" in settings.lower():
        advice = "switch it off: other processes cannot map such memory, so nothing is read directly"
        yield Finding(Level.HINT, "GPU memory", "expandable segments", advice)


def _others(host: Host, ours: int) -> Iterator[int]:
    return (number for number in range(len(host.gpus)) if number != ours)


def _ports(host: Host) -> Iterator[Finding]:
    for address, port, why in host.taken_ports:
        yield Finding(Level.BAD, "port", f"{address}:{port}: {why}", "choose another `port`, or stop who listens there")


def _disk(host: Host) -> Iterator[Finding]:
    disk = host.disk
    if disk is None:
        return
    if disk.free_bytes is None:
        yield Finding(Level.BAD, "disk", f"{disk.path}: {disk.trouble}", "name a directory of this user's own")
    else:
        is_good = disk.free_bytes >= MIN_DISK
        advice = "" if is_good else f"less than {_gib(MIN_DISK)}: few prefixes will be kept"
        yield Finding(
            Level.GOOD if is_good else Level.HINT, "disk", f"{disk.path}: {_gib(disk.free_bytes)} free", advice
        )


def _key(config: FerryConfig) -> Iterator[Finding]:
    if config.transfer.curve_key is None:
        if config.transfer.bind_host not in ("127.0.0.1", "::1", "localhost"):
            advice = "anybody who reaches the port may speak to it: kvferry keygen, then `curve_key`"
            yield Finding(Level.HINT, "encryption", f"none at {config.transfer.bind_host}", advice)
        return
    path = Path(config.transfer.curve_key)
    try:
        mode = path.stat().st_mode & 0o777
    except OSError as error:
        yield Finding(Level.BAD, "key file", str(error), "kvferry keygen makes one")
        return
    if mode & 0o077:
        yield Finding(Level.BAD, "key file", f"{path}, mode {mode:o}", f"chmod 600 {path}")
    elif trouble := _trouble_with(path):
        yield Finding(Level.BAD, "key file", trouble, "kvferry keygen makes one")
    else:
        yield Finding(Level.GOOD, "key file", f"{path}, mode {mode:o}")


def _trouble_with(key: Path) -> str:
    """Why an engine could not use this key file; empty if it could."""
    try:
        from kv_transfer.keys import load_keys

        load_keys(key)
    except (CallerError, ImportError) as error:
        return str(error)
    return ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
