# SPDX-License-Identifier: Apache-2.0
"""The caches on which `gpu_kernels.py` times kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_SIZE, KV_HEADS, GROUP, HEAD_SIZE = 16, 8, 4, 128  # Llama 3 8B, bfloat16
DEVICE = "cuda"


@dataclass
class Layers:
    """Paged caches of several layers with one table; shapes as in kernels/records.py."""

    caches: list[tuple[torch.Tensor, torch.Tensor]]
    table: torch.Tensor
    lens: torch.Tensor
    context: int

    @staticmethod
    def build(requests: int, context: int, layers: int) -> Layers:
        blocks = requests * context // BLOCK_SIZE
        pool = torch.empty(
            (layers, blocks, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE),
            dtype=torch.bfloat16,
            device=DEVICE,
        )
        caches = [(layer[..., :HEAD_SIZE], layer[..., HEAD_SIZE:]) for layer in pool.normal_()]
        order = torch.randperm(blocks, device=DEVICE).to(torch.int32)
        lens = torch.full((requests,), context, dtype=torch.int32, device=DEVICE)
        return Layers(caches, order.view(requests, -1), lens, context)

    def queries(self, tokens_each: int) -> torch.Tensor:
        shape = (self.lens.numel() * tokens_each, KV_HEADS * GROUP, HEAD_SIZE)
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
