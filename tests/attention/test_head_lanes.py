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
from vllm_pyramid.kernels import get_ops, reference
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.step import Step

pytestmark = pytest.mark.cpu

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
            *(lanes.as_one_head(keys), lanes.as_one_head(values)),
            *(self.keys, self.values, slots),
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


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([1, 1, 1, 1], id="decode"),
        pytest.param([50, 1, 23, 130], id="mixed"),
        pytest.param([61, 48, 73, 130], id="prompts"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_each_head_attends_to_what_it_holds(counts: list[int], device: str) -> None:
    lens = [61, 48, 73, 130]
    ops: Any = reference if device == "reference" else get_ops("cpu")
    layer, lanes = Layer(lens), HeadLanes(G, N)
    skips = np.array([[0, 0, 0, 0], [11, 24, 0, 96], [48, 47, 70, 0]])
    skips = np.minimum(skips, np.array(lens) - np.array(counts))
    seq_lens = torch.tensor(lens, dtype=torch.int32)

    def begin(counts: Sequence[int]) -> Any:
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        return lanes.of_step(a_step(skips), starts, seq_lens, max(lens) + 9)

    layer.write(lanes, ops, begin(lens), lens)  # a step before
    assert not layer.keys[1:][:-1].isnan().all()
    step = begin(counts)
    layer.write(lanes, ops, step, counts)
    query = torch.randn(sum(counts), G * GROUP, D)
    batch = AttentionBatch(
        query,
        layer.keys,
        layer.values,
        lanes.tables(step, layer.table),
        step.query_starts,
        step.seq_lens,
        torch.from_numpy(skips.astype(np.int32)).T.flatten(),
    )
    out = torch.full_like(query, torch.nan)
    lanes.attend(ops, batch, Softmax(D**-0.5), out)
    expected = oracle(layer, query, counts, skips)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)
    # What evictions see of a lane is the same request with one KV head.
    whole = AttentionInputs(ops, 2, batch, Softmax(D**-0.5))
    for lane, inputs in enumerate(lanes.split(whole)):
        assert inputs.layer == 2 * G + lane
        alone = torch.empty(inputs.query.shape)
        ops.paged_attention(alone, inputs.batch, inputs.softmax)
        theirs = out[:, lane * GROUP : (lane + 1) * GROUP]
        torch.testing.assert_close(alone, theirs, rtol=0, atol=0 if device == "cpu" else 1e-6)


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
