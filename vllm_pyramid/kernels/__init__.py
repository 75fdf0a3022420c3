# SPDX-License-Identifier: Apache-2.0
"""Kernels: one contract (`contract.py`) and three back ends that implement it."""

from __future__ import annotations

import functools
import logging
import os

from vllm_pyramid.kernels.contract import Ops

logger = logging.getLogger(f"vllm.{__name__}")

DEVICE_TYPES = ("cpu", "cuda")
# Set to 1, it lets the PyTorch reference stand in for a C++ library that cannot be used.
REFERENCE_VARIABLE = "VLLM_PYRAMID_ALLOW_REFERENCE"


@functools.cache
def get_ops(device_type: str) -> Ops:
    """Return the module that implements `Ops` for "cpu" (C++) or "cuda" (Triton); made once a
    process.

    If the C++ library cannot be used, the CPU gets the PyTorch reference after one warning where
    `VLLM_PYRAMID_ALLOW_REFERENCE` is 1, and a RuntimeError with the reason elsewhere. ValueError:
    another device type, or `VLLM_PYRAMID_CPU_ISA` names what this CPU lacks.
    """
    if device_type == "cuda":
        from vllm_pyramid.kernels.triton import functions as triton_ops

        return triton_ops
    if device_type != "cpu":
        raise ValueError(f"no kernels for device type {device_type!r}; one of {DEVICE_TYPES}")
    from vllm_pyramid.kernels.cpu import functions as cpu

    reason = cpu.load_error()
    if not reason:
        return cpu
    if os.environ.get(REFERENCE_VARIABLE) != "1":
        raise RuntimeError(
            f"a KV policy on the CPU needs the C++ kernels: {reason}. Set {REFERENCE_VARIABLE}=1 "
            "to run the PyTorch kernels instead, which are many times slower"
        )
    from vllm_pyramid.kernels import reference

    logger.warning(
        "%s=1: running the PyTorch kernels on the CPU, many times slower than C++: %s",
        REFERENCE_VARIABLE,
        reason,
    )
    return reference
