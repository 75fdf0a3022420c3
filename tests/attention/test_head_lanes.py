# SPDX-License-Identifier: Apache-2.0
"""Lanes against an oracle in float64: requests of one KV head give what a layer of several would.

Shape legend: R requests, G KV heads, T tokens of the step, H query heads, N tokens of a lane's
block, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_pyramid.attention.per_head.lanes import HeadLanes
from vllm_pyramid.attention.per_head.layout import HeadTableLayout
from vllm_pyramid.step.step import Step

G, GROUP, N, D = 3, 2, 24, 32


class Layer:
    """A layer's cache with a table of each head in the tables of its requests, all shuffled."""

    def __init__(self, lens: Sequence[int], seed: int = 0) -> None:
        self.lens = list(lens)
        generator = torch.Generator().manual_seed(seed)
        blocks = [-(-tokens // N) for tokens in lens]
        order = torch.randperm(sum(blocks) * G, generator=generator) + 1
        self.table = torch.zeros(len(lens) + 2, (max(blocks) + 2) * G, dtype=torch.int32)
        for row, count in enumerate(blocks):
            start = sum(blocks[:row]) * G
            self.table[row, : count * G] = order[start : start + count * G].int()
        shape = (len(order) + 1, 1, N, D)
        self.keys, self.values = (torch.full(shape, torch.nan) for _ in range(2))
        self.rows = [torch.randn(2, tokens, G, D, generator=generator) for tokens in lens]

    def write(self, lanes: HeadLanes, ops: Any, step: Any, counts: Sequence[int]) -> None:
        """Write the last `counts` tokens of each request, as the back end does."""
        new = [rows[:, -count:] for rows, count in zip(self.rows, counts, strict=True)]
        keys, values = torch.cat(new, dim=1)
        slots = lanes.slots(step, self.table)
        ops.reshape_and_cache(
            *(lanes.as_one_head(keys), lanes.as_one_head(values)), *(self.keys, self.values, slots)
        )


def oracle(
    layer: Layer, query: torch.Tensor, counts: Sequence[int], skips: np.ndarray
) -> torch.Tensor:
    """Attention of each head to what it holds: `[T, H, D]`."""
    found, end = torch.empty(query.shape, dtype=torch.float64), 0
    for row, count in enumerate(counts):
        tokens, start = layer.lens[row], end
        end += count
        keys, values = layer.rows[row].double()
        for head in range(G * GROUP):
            lane = head // GROUP
            logits = query[start:end, head].double() @ keys[:, lane].T * D**-0.5
            hidden = torch.ones(count, tokens, dtype=torch.bool).triu(tokens - count + 1)
            hidden[:, : skips[lane, row]] = True
            weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            found[start:end, head] = weights @ values[:, lane]
    return found


def a_step(skips: np.ndarray) -> Step:
    step = Step.nothing(len(skips), skips.shape[1])
    step.skips = skips.astype(np.int32)
    return step


def test_layers_share_the_lanes_of_a_step() -> None:
    lanes = HeadLanes(G, N)
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    first = a_step(np.zeros((3, 1)))
    made = lanes.of_step(first, starts, lens, 9)
    assert lanes.of_step(first, starts, lens, 9) is made and made.order is None
    assert lanes.of_step(a_step(np.zeros((3, 1))), starts, lens + 1, 10) is not made


def test_attention_without_lanes_is_refused() -> None:
    layout = HeadTableLayout(G, N)
    with pytest.raises(ValueError, match="has no block tables of single KV heads"):
        layout.check("layers.0", SimpleNamespace())
    with pytest.raises(ValueError, match="learned sinks"):
        layout.check("layers.0", SimpleNamespace(serves_single_heads=True, sinks=torch.zeros(2)))
