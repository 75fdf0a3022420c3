# SPDX-License-Identifier: Apache-2.0
"""The platform plugin: vLLM on a machine without an accelerator.

vLLM's wheel for CUDA contains no kernels for the CPU and selects no platform where it finds no
device. With this plugin it runs there: attention comes from `csrc/`, everything else from PyTorch.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
NO_GPU_KERNELS = "HUMMING_DISABLE_PARALLEL_BUILD"
_GROUP = "vllm.platform_plugins"
_OUR_PLATFORM = "vllm_pyramid.platform.cpu.PyramidCpuPlatform"


def cpu_platform_plugin() -> str | None:
    """Entry point `vllm.platform_plugins`: our platform's path, or None to leave vLLM alone.

    A plugin wins over everything that is built into vLLM, so ours is offered only where vLLM would
    find nothing at all: none of its own detections answers (asked with its own functions; a GPU
    that is merely hidden from this process still counts) and no other package brings a platform.

    Where it is, PyTorch is asked for huge pages: blocks lie at random in the cache, so small pages
    cost an address translation every few rows. It looks at the variable once, when it allocates
    for the first time, and an engine may run in this very process: later would be too late.
    And a package that vLLM imports is told not to compile kernels for GPUs in the background, which
    it would do in two processes beside every engine.
    """
    from vllm.platforms import builtin_platform_plugins

    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return None
    others = [plugin for plugin in entry_points(group=_GROUP) if plugin.module != __name__]
    if others or any(detect() is not None for detect in builtin_platform_plugins.values()):
        return None
    os.environ.setdefault(HUGE_PAGES, "1")
    os.environ.setdefault(NO_GPU_KERNELS, "1")
    return _OUR_PLATFORM
