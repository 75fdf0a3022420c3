# SPDX-License-Identifier: Apache-2.0
"""The platform plugin: a KV policy's attention on CPUs.

With a CPU build of vLLM everything but attention is vLLM's own, and without a policy attention
is too. The CUDA wheel on a machine without a GPU has no kernels for the CPU: there the few
operators that are missing come from PyTorch, which is slow, and good for tests.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
NO_GPU_KERNELS = "HUMMING_DISABLE_PARALLEL_BUILD"
_GROUP = "vllm.platform_plugins"
_CPU_BUILD = "vllm_pyramid.compat.platform.cpu_platform.PyramidCpuPlatform"
_CUDA_WHEEL = "vllm_pyramid.compat.platform.wheel.WheelCpuPlatform"


def cpu_platform_plugin() -> str | None:
    """Entry point `vllm.platform_plugins`: our platform's path, or None to leave vLLM alone.

    A plugin wins over everything that is built into vLLM, so ours is offered only where vLLM would
    choose its CPU platform, from which ours is derived, or find nothing at all. vLLM is asked with
    its own functions (a GPU that is merely hidden from this process still counts), and a platform
    of another package keeps ours away.

    Where it is offered, PyTorch is asked for huge pages: blocks lie at random in the cache, so
    small pages cost an address translation every few rows. It looks at the variable once, when it
    allocates for the first time, and an engine may run in this very process: later would be too
    late. A package that vLLM imports is told not to compile kernels for GPUs in the
    background, which it would do in two further processes of every engine.
    """
    from vllm.platforms import builtin_platform_plugins

    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return None
    others = [plugin for plugin in entry_points(group=_GROUP) if plugin.module != __name__]
    found = {name for name, detect in builtin_platform_plugins.items() if detect() is not None}
    if others or found - {"cpu"}:
        return None
    os.environ.setdefault(HUGE_PAGES, "1")
    os.environ.setdefault(NO_GPU_KERNELS, "1")
    return _CPU_BUILD if found else _CUDA_WHEEL
