# SPDX-License-Identifier: Apache-2.0
"""The platform plugin: a KV policy's attention on CPUs.

With a CPU build of vLLM everything but attention is vLLM's own, and without a policy its platform
is too: `cpu_platform.activate` puts ours in its place when an engine asks for a policy, and
processes that such an engine starts find `ACTIVE` in their environment.

The CUDA wheel on a machine without a GPU has no platform at all. With ours it runs, policy or not:
missing operators come from PyTorch, which is slow, and good for tests.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from vllm_pyramid.compat.versions import WrongVLLMError, check_vllm

# Set for the processes of an engine with a policy. Ray takes variables of vLLM's to other hosts.
ACTIVE = "PYRAMID_CPU_PLATFORM"
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
NO_GPU_KERNELS = "HUMMING_DISABLE_PARALLEL_BUILD"
_GROUP = "vllm.platform_plugins"
_CPU_BUILD = "vllm_pyramid.compat.platform.cpu_platform.PyramidCpuPlatform"
_CUDA_WHEEL = "vllm_pyramid.compat.platform.wheel.WheelCpuPlatform"


def cpu_platform_plugin() -> str | None:
    """Entry point `vllm.platform_plugins`: our platform's path, or None to leave vLLM alone.

    A plugin wins over everything that is built into vLLM, so ours is offered only where vLLM would
    choose its CPU platform for an engine with a policy, or finds nothing at all. vLLM is asked with
    its own functions (a GPU that is merely hidden from this process still counts), and a platform
    of another package keeps ours away.

    For the CUDA wheel, a package that vLLM imports is told not to compile kernels for GPUs in the
    background, in two further processes of every engine.
    """
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return None
    try:
        check_vllm()
    except WrongVLLMError:
        return None
    from vllm.platforms import builtin_platform_plugins

    others = [plugin for plugin in entry_points(group=_GROUP) if plugin.module != __name__]
    found = {name for name, detect in builtin_platform_plugins.items() if detect() is not None}
    if others or found - {"cpu"}:
        return None
    if found:
        return _CPU_BUILD if os.environ.get(ACTIVE) else None
    os.environ.setdefault(NO_GPU_KERNELS, "1")
    return _CUDA_WHEEL
