# SPDX-License-Identifier: Apache-2.0
"""The platform plugin: vLLM on a machine without an accelerator.

vLLM's wheel for CUDA contains no kernels for the CPU and selects no platform where it finds no
device. With this plugin it runs there: attention comes from `csrc/`, everything else from PyTorch.
"""

from __future__ import annotations

import importlib.util


def cpu_platform_plugin() -> str | None:
    """Entry point `vllm.platform_plugins`: our platform's path, or None to leave vLLM alone.

    It is offered only where vLLM itself would find nothing: no accelerator, and a vLLM that was
    not built for the CPU (such a build has its own platform and kernels).
    """
    import torch

    if torch.cuda.is_available() or importlib.util.find_spec("vllm._C") is not None:
        return None
    if torch.accelerator.is_available():
        return None
    return "vllm_pyramid.platform.cpu.PyramidCpuPlatform"
