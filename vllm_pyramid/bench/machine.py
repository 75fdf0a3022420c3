# SPDX-License-Identifier: Apache-2.0
"""How fast this machine reads and multiplies, for the cost model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["machine"]


def machine() -> dict[str, float]:
    """Bytes/s of a streaming read and operations/s of a large bfloat16 product, of this device."""
    import torch
    from vllm.platforms import current_platform

    device = "cpu" if current_platform.is_cpu() else "cuda"

    def fastest(function: Callable[[], Any], rounds: int) -> float:
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times)

    size = (256 if device == "cpu" else 4096) << 20
    read = fastest(_reader(size, device), 20)
    edge = 1024 if device == "cpu" else 8192
    left = torch.randn(edge, edge, device=device).bfloat16()
    right = torch.randn(edge, edge, device=device).bfloat16()
    product = fastest(lambda: left @ right, 20)
    return {"bandwidth": size / read, "flops": 2 * edge**3 / product}


def _reader(size: int, device: str) -> Callable[[], Any]:
    """Something that reads `size` bytes once."""
    import torch

    data = torch.ones(size // 8, dtype=torch.int64, device=device)
    if device != "cpu":
        return data.sum
    from vllm_pyramid.ops.cpu_library import load

    library, threads = load(), torch.get_num_threads()
    return lambda: library.pyr_read(data.data_ptr(), size, threads)
