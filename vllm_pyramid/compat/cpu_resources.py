# SPDX-License-Identifier: Apache-2.0
"""Memory, cores and units of the host that this process may use.

A container's limit is below the machine's memory, and cores and nodes must be the same that vLLM's
worker will find. vLLM's attention packs K by whether the processor has AMX tiles.
"""

from __future__ import annotations

import psutil
import torch
from vllm.utils.cpu_resource_utils import (
    get_allowed_cpu_list,
    get_cgroup_memory_limit,
    get_cgroup_memory_usage,
    get_memory_node_info,
    get_visible_memory_node,
)


def available_host_memory() -> int:
    """Return the available bytes of the machine, or of the container where that has a limit."""
    available: int = psutil.virtual_memory().available
    limit = get_cgroup_memory_limit()
    if limit is not None:
        available = min(available, limit - (get_cgroup_memory_usage() or 0))
    return max(0, available)


def cores_by_node() -> list[list[int]]:
    """Return one logical CPU of every core, for each memory node that this process may use."""
    found: dict[int, dict[int, int]] = {node: {} for node in get_visible_memory_node()}
    for cpu in get_allowed_cpu_list():
        if cpu.numa_node in found:
            core = found[cpu.numa_node]
            core[cpu.physical_core] = max(cpu.id, core.get(cpu.physical_core, -1))
    return [sorted(core.values()) for core in found.values() if core]


def free_by_node() -> list[int]:
    """Return the bytes that are free on each memory node that this process may use."""
    return [get_memory_node_info(node).available_memory for node in get_visible_memory_node()]


def memory_of_worker_node(workers: int) -> tuple[int, int, int]:
    """Return this worker's memory node: its bytes, its free bytes, how many `workers` share it."""
    nodes = get_visible_memory_node()
    node = get_allowed_cpu_list()[0].numa_node
    info = get_memory_node_info(node if node in nodes else nodes[0])
    return info.total_memory, info.available_memory, -(-workers // max(1, len(cores_by_node())))


def units_of_processor() -> str:
    """Return the processor's vector and matrix units, on which the layout of a cache depends."""
    tiles = "tiles" if torch.cpu._is_amx_tile_supported() else "no tiles"
    return f"{torch.backends.cpu.get_cpu_capability()}, {tiles}"
