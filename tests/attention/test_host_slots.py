# SPDX-License-Identifier: Apache-2.0
"""Slots of all layers at once, against vLLM's way of one layer at a time."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_pyramid.attention.host_slots import PAD_SLOT, HostSlots
from vllm_pyramid.compat.platform.torch_ops import compute_slot_mapping

TOKENS, REQUESTS, ENTRIES = 64, 6, 20


def groups(block_sizes: list[int]) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(
            block_size=size,
            block_table=SimpleNamespace(
                gpu=torch.randint(1 << 20, (REQUESTS, ENTRIES), dtype=torch.int32)
            ),
            slot_mapping=SimpleNamespace(gpu=torch.full((TOKENS,), 7, dtype=torch.int64)),
        )
        for size in block_sizes
    ]


@pytest.mark.parametrize("block_sizes", [[16], [16, 16, 16], [16, 32, 16, 32]])
def test_as_vllm_does_it_layer_by_layer(block_sizes: list[int]) -> None:
    """Long and short steps in turn, so that what one leaves behind the next is seen."""
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    layers = groups(block_sizes)
    fill = HostSlots(layers)
    for step in range(40):
        count = int(draw.integers(1, REQUESTS + 1))
        queries = draw.integers(1, 10 if step % 2 else 2, count)
        starts = torch.zeros(REQUESTS + 1, dtype=torch.int32)
        starts[1 : count + 1] = torch.from_numpy(queries.cumsum())
        first = draw.integers(0, ENTRIES * min(block_sizes) - 10, count)
        places = [torch.arange(a, a + n) for a, n in zip(first, queries, strict=True)]
        positions = torch.cat(places)
        fill(count, starts[: count + 1], positions)
        for layer in layers:
            wanted = torch.zeros(TOKENS, dtype=torch.int64)
            table = layer.block_table.gpu
            compute_slot_mapping(
                *(len(positions), TOKENS, starts[: count + 1], positions, table, ENTRIES, wanted),
                *(layer.block_size, 1, 0, 1, PAD_SLOT, 1024),
            )
            assert torch.equal(layer.slot_mapping.gpu, wanted)


def test_tables_and_buffers_may_be_replaced() -> None:
    """vLLM's CPU runner puts other tensors into its buffers after they were made."""
    (layer,) = layers = groups([16])
    fill = HostSlots(layers)
    layer.block_table.gpu = torch.full((REQUESTS, ENTRIES), 3, dtype=torch.int32)
    layer.slot_mapping.gpu = torch.zeros(TOKENS, dtype=torch.int64)
    fill(1, torch.tensor([0, 2], dtype=torch.int32), torch.tensor([15, 16]))
    assert layer.slot_mapping.gpu[:2].tolist() == [3 * 16 + 15, 3 * 16]
    assert (layer.slot_mapping.gpu[2:] == PAD_SLOT).all()
