# SPDX-License-Identifier: Apache-2.0
"""From the host's arrays to the device's tensors."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of `values` on the device; on the CPU it shares their memory.

    The copy goes through pinned memory and does not wait. The allocator of pinned memory keeps the
    source until the device has read it.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
