# SPDX-License-Identifier: Apache-2.0
"""Copies of the host's arrays on the device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return a tensor of `values` on the device; on the CPU it shares their memory.

    The copy goes through pinned memory, and the host does not wait for it. The allocator of pinned
    memory keeps the source until the device has read it.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
