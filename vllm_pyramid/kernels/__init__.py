# SPDX-License-Identifier: Apache-2.0
"""The kernels: one contract (`contract.py`), three back ends."""

from __future__ import annotations

import functools
import logging

from vllm_pyramid.kernels.contract import Ops

logger = logging.getLogger(f"vllm.{__name__}")

DEVICE_TYPES = ("cpu", "cuda")


@functools.cache
def get_ops(device_type: str) -> Ops:
    """The module with the kernels for a device.

    On CPU these are the C++ kernels, or, where they were not built, the PyTorch reference after one
    warning.

    Args:
        device_type: "cpu" or "cuda", as `torch.device.type`.

    Raises:
        ValueError: another device type, or an instruction set that this CPU lacks was asked for.
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
