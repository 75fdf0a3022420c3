# SPDX-License-Identifier: Apache-2.0
"""Threads, memory and the platform on the CPU, where the user chose none.

vLLM takes 92 % of a memory node and refuses to start where other processes have more than the rest;
it keeps one core a worker for the front end, half of a machine of two. Here a worker takes what is
free, and all cores where they are few. What the user sets wins: `--gpu-memory-utilization`,
`--kv-cache-memory-bytes`, `VLLM_CPU_OMP_THREADS_BIND`, `VLLM_CPU_NUM_OF_RESERVED_CPU`,
`OMP_NUM_THREADS`, `THP_MEM_ALLOC_ENABLE`.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from vllm_pyramid.compat.cpu_resources import cores_by_node, memory_of_worker_node
from vllm_pyramid.compat.platform import ACTIVE, HUGE_PAGES, cpu_platform

logger = init_logger(f"vllm.{__name__}")

MEMORY_KEY = "vllm_pyramid_cpu_memory"  # of additional_config: the worker chooses its share
BIND = "VLLM_CPU_OMP_THREADS_BIND"
# Set for started processes to what was chosen for them, as JSON.
CHOSEN = "PYRAMID_CHOSEN"
_CHOSEN_BY_USER = (BIND, "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_SIM_MULTI_NUMA")
# Cores of a worker from which on reserving one of them for the front end costs little.
CORES_TO_SPARE = 8
# Of what is free: the rest is for activations, and for what other processes still take.
SHARE_OF_FREE = 0.8


def choose(args: EngineArgs) -> None:
    """Choose threads and memory for an engine about to be configured, where `args` leave them open.

    vLLM reads the threads from this process's environment. The engine's processes ask for huge
    pages: blocks lie at random in the cache, so small pages cost an address translation every few
    rows. PyTorch reads that once, when it first allocates, so an engine in this process has them
    only where the user set the variable.
    """
    withdraw()
    cpu_platform.activate()
    chosen_for_children(ACTIVE, "1")
    if HUGE_PAGES not in os.environ:
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            logger.info(
                "memory: this process has small pages, which slow decoding; start it with %s=1",
                HUGE_PAGES,
            )
        chosen_for_children(HUGE_PAGES, "1")
    replicas = replicas_here(args)
    workers = args.tensor_parallel_size * args.pipeline_parallel_size
    if args.distributed_executor_backend == "ray":
        logger.info(
            "threads: each worker of Ray has OMP_NUM_THREADS of the environment of `ray start`, or "
            "one"
        )
    elif args.nnodes == 1 and replicas:
        bind = threads_to_bind(os.environ, workers, cores_by_node(), replicas)
        if bind is not None:
            chosen_for_children(BIND, bind)
            logger.info("threads: %s=%s; set it to change that", BIND, bind)
    if share_is_vllms(args) and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        args.additional_config = {**args.additional_config, MEMORY_KEY: max(1, replicas)}


def replicas_here(args: EngineArgs) -> int:
    """Engines of this command's that share this host (data parallelism); 0 for a front end alone.

    An engine of several is told later that it is the only one.
    """
    if args.data_parallel_size_local is not None:
        return args.data_parallel_size_local
    if args.data_parallel_external_lb or args.data_parallel_rank is not None:
        return 1
    return args.data_parallel_size


_chosen: dict[str, str] = {}  # variables that this process owes to `choose` and `choose_weights`


def chosen_for_children(name: str, value: str) -> None:
    """Set a variable of the environment until `withdraw`; started processes inherit it."""
    os.environ[name] = _chosen[name] = value
    os.environ[CHOSEN] = json.dumps(_chosen)


def withdraw() -> None:
    """Take back what was chosen for an earlier engine of this process, or inherited from one.

    Processes that vLLM started, such as a second front end, keep what was chosen for them.
    """
    cpu_platform.deactivate()
    os.environ.pop(ACTIVE, None)
    inherited = {}
    if multiprocessing.parent_process() is None:
        inherited = json.loads(os.environ.pop(CHOSEN, "{}"))
    for name, value in (inherited | _chosen).items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _chosen.clear()


def threads_to_bind(
    environment: Mapping[str, str], workers: int, nodes: Sequence[Sequence[int]], replicas: int = 1
) -> str | None:
    """Return the value of `VLLM_CPU_OMP_THREADS_BIND`; None leaves it to vLLM or the user.

    Args:
        workers: processes that compute, of one engine.
        nodes: the logical CPUs of each memory node, one of every core.
        replicas: engines; vLLM would bind all of them to the same cores.
    """
    if any(environment.get(name) for name in _CHOSEN_BY_USER):
        return None
    if environment.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        return None  # the engine runs in the user's own process, whose threads they are
    if environment.get("OMP_NUM_THREADS"):
        return "nobind"  # vLLM would set another number
    workers *= replicas
    if len(nodes) >= workers:
        shares = [list(nodes[worker]) for worker in range(workers)]
        if min(map(len, shares)) > CORES_TO_SPARE:
            if replicas == 1:
                return None  # vLLM's own rule: all but one core of each node
            shares = [share[:-1] for share in shares]
    else:  # vLLM would refuse to start
        homes = [worker * len(nodes) // workers for worker in range(workers)]
        shares = []
        for node, cores in enumerate(nodes):
            count, size = homes.count(node), len(cores)
            shares += [
                list(cores[i * size // count : (i + 1) * size // count]) for i in range(count)
            ]
        shares = [share[:-1] if len(share) > CORES_TO_SPARE else share for share in shares]
    if not all(shares):
        return "nobind"  # more workers than cores
    return "|".join(",".join(map(str, sorted(share))) for share in shares)


def share_is_vllms(args: EngineArgs) -> bool:
    """Return whether the share of the memory is vLLM's default, and no size was given either."""
    if args.kv_cache_memory_bytes is not None:
        return False
    from vllm import LLM

    own = inspect.signature(LLM.__init__).parameters["gpu_memory_utilization"].default
    # Compared by identity: a user who writes the same number has chosen it.
    return any(args.gpu_memory_utilization is one for one in (own, _ARGS_DEFAULT))


_ARGS_DEFAULT = EngineArgs.gpu_memory_utilization


def keep_threads() -> None:
    """Limit numba's threads to PyTorch's in a worker that drafts.

    vLLM looks for n-grams with it. When its threads start, it sets the process's number of OpenMP
    threads to the machine's cores, and so that of every later matrix product.
    """
    if "numba" not in sys.modules:  # it reads this once
        os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))


def take_free_memory(config: Any) -> None:
    """Ask for what the worker's memory node has to spare, if the share was left open.

    Workers that share a node share it evenly, those of other replicas included.
    """
    replicas = config.additional_config.get(MEMORY_KEY)
    if replicas is None:
        return
    workers = replicas * config.parallel_config.local_world_size
    total, free, sharing = memory_of_worker_node(workers)
    # vLLM takes what this process already has out of the share, so it comes on top of it.
    own = psutil.Process().memory_info().rss
    wanted = min(SHARE_OF_FREE * free / sharing + own, free)
    share = min(config.cache_config.gpu_memory_utilization, wanted / total)
    config.cache_config.gpu_memory_utilization = share
    logger.info(
        "memory: at most %.1f GiB for model and KV cache, of %.1f GiB free (%.2f of the node's "
        "%.1f GiB); set --gpu-memory-utilization or --kv-cache-memory-bytes to change it",
        share * total / 2**30,
        free / 2**30,
        share,
        total / 2**30,
    )
