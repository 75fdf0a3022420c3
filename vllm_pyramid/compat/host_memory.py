# SPDX-License-Identifier: Apache-2.0
"""Memory of the host that this process can still have.

Target: `vllm.utils.cpu_resource_utils.get_cgroup_memory_limit`, `get_cgroup_memory_usage`. Why: a
container's limit is below what the machine has, and vLLM sizes its own half of the memory by it.
"""

from __future__ import annotations

import psutil
from vllm.utils.cpu_resource_utils import get_cgroup_memory_limit, get_cgroup_memory_usage


def available_host_memory() -> int:
    """Bytes; of the machine, or of the container where that has a limit."""
    available: int = psutil.virtual_memory().available
    limit = get_cgroup_memory_limit()
    if limit is not None:
        available = min(available, limit - (get_cgroup_memory_usage() or 0))
    return max(0, available)
