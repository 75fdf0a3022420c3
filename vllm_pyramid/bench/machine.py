# SPDX-License-Identifier: Apache-2.0
"""How fast this machine reads and multiplies, for the cost model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["machine"]

ROUNDS = 20


def machine() -> dict[str, float]:
    """Bytes/s of a streaming read and operations/s of a large bfloat16 product, of this device."""
    import torch
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    device = "cpu" if on_cpu else "cuda"

    def fastest(function: Callable[[], Any]) -> float:
        times = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            function()
            if not on_cpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times)

    size = (256 if on_cpu else 4096) << 20
    data = torch.ones(size // 8, dtype=torch.int64, device=device)
    read: Callable[[], Any] = data.sum
    if on_cpu:
        from vllm_pyramid.ops.cpu_library import load

        library, threads = load(), torch.get_num_threads()
        read = lambda: library.pyr_read(data.data_ptr(), size, threads)  # noqa: E731
    edge = 1024 if on_cpu else 8192
    left, right = (torch.randn(edge, edge, device=device).bfloat16() for _ in range(2))
    return {
        "bandwidth": size / fastest(read),
        "flops": 2 * edge**3 / fastest(lambda: left @ right),
    }
