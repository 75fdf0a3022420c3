# SPDX-License-Identifier: Apache-2.0
"""Kernels: one contract (`contract.py`) and three back ends that implement it."""

from __future__ import annotations

import functools
import logging

from vllm_pyramid.kernels.contract import Ops

logger = logging.getLogger(f"vllm.{__name__}")

DEVICE_TYPES = ("cpu", "cuda")


@functools.cache
def get_ops(device_type: str) -> Ops:
    """Return the module that implements `Ops` for a device type.

    "cuda" gets the Triton kernels. "cpu" gets the C++ kernels, or, if their library cannot be used,
    the PyTorch reference after one warning. The choice is made once per process.

    Args:
        device_type: "cpu" or "cuda", as in `torch.device.type`.

    Raises:
        ValueError: another device type, or `VLLM_PYRAMID_CPU_ISA` names an instruction set that
            this CPU lacks.
    """
    if device_type == "cuda":
        from vllm_pyramid.kernels.triton import functions as triton_ops

        return triton_ops
    if device_type != "cpu":
        raise ValueError(f"no kernels for device type {device_type!r}; one of {DEVICE_TYPES}")
    from vllm_pyramid.kernels import reference
    from vllm_pyramid.kernels.cpu import functions as cpu

    reason = cpu.load_error()
    if not reason:
        return cpu
    logger.warning("Using the much slower PyTorch kernels on CPU: %s", reason)
    return reference
