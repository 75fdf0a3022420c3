# SPDX-License-Identifier: Apache-2.0
"""Host memory that a GPU addresses, and a stream for copies to and from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

from vllm_pyramid.step.hooks import CopyStream, HostMemory

# cudaHostRegister: for all contexts, and mapped into the device's addresses.
_PORTABLE_AND_MAPPED = 3


class CudaCopyStream:
    """The `hooks.CopyStream` of a GPU: an event on each side of every launch."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def launch(self, copy: Callable[..., None], *args: Any, **kwargs: Any) -> torch.cuda.Event:
        self._stream.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._stream):
            copy(*args, **kwargs)
        return self._stream.record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def is_done(self, mark: torch.cuda.Event) -> bool:
        return mark.query()


class PinnedMemory(HostMemory):
    """Host memory that is pinned in place: PyTorch would round it up to a power of two.

    Raises:
        RuntimeError: the driver does not pin the memory.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        address = self.host.data_ptr()
        error = torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE_AND_MAPPED)
        if int(error) or not self.host.is_pinned():
            raise RuntimeError(
                f"the driver did not pin {num_bytes / 2**30:.3g} GiB of host memory (error "
                f"{int(error)}): set a smaller --kv-swap-space or --kv-host-cache, or raise the "
                "limit on locked memory"
            )
        self.bytes = get_accelerator_view_from_cpu_tensor(self.host)

    def release(self) -> None:
        """Unpin the memory, once the device has finished its work."""
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr())


def copies_of(device: torch.device) -> CopyStream | None:
    """Return a stream for copies, where the device has a memory of its own."""
    return CudaCopyStream(device) if device.type == "cuda" else None


def host_memory_of(device: torch.device) -> Callable[[int], HostMemory]:
    """Return the class of host memory that this device addresses."""
    return PinnedMemory if device.type == "cuda" else HostMemory
