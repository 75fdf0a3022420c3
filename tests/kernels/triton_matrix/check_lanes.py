# SPDX-License-Identifier: Apache-2.0
"""Slots and orders of lanes, against the reference and by their definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels import table_twins
from vllm_pyramid.kernels.table_records import StepRows, TableGroups
from vllm_pyramid.kernels.triton import lanes as triton_lanes

N, LAYERS = 24, 3


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 1, 300, 2], [130, 0, 0], [0]])
def test_queries_in_the_order_of_lanes(ints, device, heads, counts):
    """Requests of one token, prompts of more than a tile, and rows of padding."""
    starts = ints([0, *np.cumsum(counts)])
    tokens, lanes = sum(counts), len(counts) * heads
    found, by_reference = (
        (
            torch.full((lanes + 4,), -9, dtype=torch.int32, device=device),
            torch.full((tokens * heads + 4,), -9, device=device),
        )
        for _ in "ab"
    )
    triton_lanes.lane_rows(*found, starts, heads)
    table_twins.lane_rows(*by_reference, starts, heads)
    for own, right in zip(found, by_reference, strict=True):
        assert torch.equal(own, right)
    of_lanes, order = (tensor.tolist() for tensor in found)
    assert of_lanes[lanes + 1 :] == [-9] * 3 and order[tokens * heads :] == [-9] * 4
    first = 0
    for row, count in enumerate(counts):
        for head in range(heads):
            lane = row * heads + head
            own = order[of_lanes[lane] : of_lanes[lane + 1]]
            assert own == [(first + token) * heads + head for token in range(count)]
        first += count
    if counts == [1, 1, 1]:
        assert order[: tokens * heads] == list(range(tokens * heads))


def groups_of(tables, heads, *, size=N, by_slot=False):
    """The tables of all layers, of which the sources alone are read."""
    count = len(tables)
    return TableGroups.of(
        [*tables], [*tables], [size] * count, [0] * count, count, per_layer=heads, by_slot=by_slot
    )


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize(
    ("counts", "lens"),
    [
        ([1, 1, 1], [1, 24, 97]),
        ([50, 1, 23, 200], [61, 48, 23, 300]),
        ([1, 1, 0, 0], [7, 25, 0, 0]),  # with rows of padding
    ],
)
def test_slots_of_lanes(ints, device, heads, counts, lens, by_slot):
    """A token's slot lies in its head's block; what earlier steps left behind is cleared."""
    generator = torch.Generator().manual_seed(1)
    width = -(-max(lens) // N) + 1
    order = torch.randperm(LAYERS * len(lens) * width * heads, generator=generator) + 1
    tables = order.view(LAYERS, len(lens), width * heads).int().to(device)
    starts, tokens = ints([0, *np.cumsum(counts)]), sum(counts)
    places = (tokens + 40) * heads
    requests = [*range(len(lens))]
    rows = StepRows(ints(lens), sum(count > 0 for count in counts))
    if by_slot:
        requests.reverse()
        rows = rows._replace(slots=torch.tensor(requests, device=device)[: rows.num_reqs])
    for written in (0, tokens * heads - 1, (tokens + 33) * heads):
        found, by_reference = (torch.full((LAYERS, places), -9, device=device) for _ in "ab")
        arguments = (groups_of(tables, heads, by_slot=by_slot), rows, starts, written)
        triton_lanes.lane_slots(found, *arguments)
        table_twins.lane_slots(by_reference, *arguments)
        assert torch.equal(found, by_reference)
        cleared = max(written - tokens * heads, 0)
        assert (found[:, tokens * heads :][:, :cleared] == -1).all()
        assert (found[:, tokens * heads + cleared :] == -9).all()
    token = 0
    for row, (count, length) in enumerate(zip(counts, lens, strict=True)):
        for position in range(length - count, length):
            for head in range(heads):
                block = tables[:, requests[row], position // N * heads + head].tolist()
                right = [number * N + position % N for number in block]
                assert found[:, token * heads + head].tolist() == right
            token += 1


def test_slots_beyond_32_bits(ints, device):
    tables, slots = ints([[[2**31 - 2]]]), torch.zeros(1, 1, dtype=torch.int64, device=device)
    rows = StepRows(ints([2]), 1)
    triton_lanes.lane_slots(slots, groups_of(tables, 1, size=128), rows, ints([0, 1]), 0)
    assert slots.item() == (2**31 - 2) * 128 + 1
