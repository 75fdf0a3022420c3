# SPDX-License-Identifier: Apache-2.0
"""Tables, lengths, slots and orders of lanes, against their twins and by their definition.

Shape legend: L layers, R requests, G KV heads, N tokens of a lane's block.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from tests.kernels.triton_matrix import table_twins
from vllm_pyramid.kernels.triton import lanes as triton_lanes

pytestmark = pytest.mark.cpu if os.environ.get("TRITON_INTERPRET") == "1" else pytest.mark.gpu

N, LAYERS = 24, 3


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 1, 300, 2], [130, 0, 0], [0]])
def test_queries_in_the_order_of_lanes(ints, device, heads, counts):
    """Requests of one token, prompts of more than a tile, and rows of padding."""
    starts = ints([0, *np.cumsum(counts)])
    tokens, lanes = sum(counts), len(counts) * heads
    found, twin = (
        (
            torch.full((lanes + 4,), -9, dtype=torch.int32, device=device),
            torch.full((tokens * heads + 4,), -9, device=device),
        )
        for _ in "ab"
    )
    triton_lanes.lane_rows(*found, starts, heads)
    table_twins.lane_rows_reference(*twin, starts, heads)
    for own, right in zip(found, twin, strict=True):
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


# The width of a lane's table, and how much of it is used: a tile, and more than one.
@pytest.mark.parametrize(("width", "num_columns"), [(9, 9), (9, 5), (9, 0), (1500, 1400)])
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_tables_of_lanes(ints, device, heads, width, num_columns):
    """Skip nothing, part of a block, some blocks or all; keep what lies behind, and other rows."""
    generator = torch.Generator().manual_seed(0)
    lens = [num_columns * N, max(num_columns * N - 7, 0), 30, 0]
    rows = len(lens)
    # Rows of a wider batch, and an entry that vLLM's alignment adds.
    tables = torch.randint(1, 9999, (LAYERS, rows + 2, width * heads + 1), generator=generator)
    tables = tables.int().to(device)
    skips = torch.randint(0, num_columns * N + N, (LAYERS, rows * heads + 3), generator=generator)
    skips[0], skips[1, ::2] = 0, N * (num_columns - 1)
    skips = skips.clamp(min=0).int().to(device)
    stale = torch.full((LAYERS, rows * heads + 3, width), -9, dtype=torch.int32, device=device)
    found, twin = ((stale.clone(), stale[..., 0].clone()) for _ in "ab")
    arguments = (tables, skips[:, : rows * heads], ints(lens), N, num_columns)
    for function, (own, own_lens) in (
        (triton_lanes.gather_lanes, found),
        (table_twins.gather_lanes_reference, twin),
    ):
        function(own, own_lens[:, : rows * heads], *arguments)
    for own, right in zip(found, twin, strict=True):
        assert torch.equal(own, right)
    for layer in range(LAYERS):
        for lane in range(rows * heads):
            row, head = divmod(lane, heads)
            skip = int(skips[layer, lane])
            kept = tables[layer, row, head : num_columns * heads : heads].tolist()[skip // N :]
            result = found[0][layer, lane].tolist()
            assert result[:num_columns] == kept + [0] * (num_columns - len(kept))
            assert result[num_columns:] == [-9] * (width - num_columns)
            assert found[1][layer, lane] == max(0, lens[row] - skip)
    assert (found[0][:, rows * heads :] == -9).all()


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize(
    ("counts", "lens"),
    [
        ([1, 1, 1], [1, 24, 97]),
        ([50, 1, 23, 200], [61, 48, 23, 300]),
        ([1, 1, 0, 0], [7, 25, 0, 0]),  # with rows of padding
    ],
)
def test_slots_of_lanes(ints, device, heads, counts, lens):
    """A token's slot lies in its head's block; what earlier steps left behind is cleared."""
    generator = torch.Generator().manual_seed(1)
    width = -(-max(lens) // N) + 1
    order = torch.randperm(LAYERS * len(lens) * width * heads, generator=generator) + 1
    tables = order.view(LAYERS, len(lens), width * heads).int().to(device)
    starts, tokens = ints([0, *np.cumsum(counts)]), sum(counts)
    places = (tokens + 40) * heads
    for written in (0, tokens * heads - 1, (tokens + 33) * heads):
        found, twin = (torch.full((LAYERS, places), -9, device=device) for _ in "ab")
        arguments = (tables, starts, ints(lens), heads, N, written)
        triton_lanes.lane_slots(found, *arguments)
        table_twins.lane_slots_reference(twin, *arguments)
        assert torch.equal(found, twin)
        cleared = max(written - tokens * heads, 0)
        assert (found[:, tokens * heads :][:, :cleared] == -1).all()
        assert (found[:, tokens * heads + cleared :] == -9).all()
    token = 0
    for row, (count, length) in enumerate(zip(counts, lens, strict=True)):
        for position in range(length - count, length):
            for head in range(heads):
                block = tables[:, row, position // N * heads + head].tolist()
                right = [number * N + position % N for number in block]
                assert found[:, token * heads + head].tolist() == right
            token += 1


def test_slots_beyond_32_bits(ints, device):
    tables, slots = ints([[[2**31 - 2]]]), torch.zeros(1, 1, dtype=torch.int64, device=device)
    triton_lanes.lane_slots(slots, tables, ints([0, 1]), ints([2]), 1, 128, 0)
    assert slots.item() == (2**31 - 2) * 128 + 1


def test_what_does_not_fit(ints, device):
    lens, tables = ints([5, 6]), torch.zeros(1, 2, 8, dtype=torch.int32, device=device)
    lanes, four = torch.zeros(1, 4, 4, dtype=torch.int32, device=device), ints([[0] * 4])
    with pytest.raises(ValueError, match="num_columns is 5, the tables have 4"):
        triton_lanes.gather_lanes(lanes, four.clone(), tables, four, lens, N, 5)
    with pytest.raises(ValueError, match="3 lanes are not those of 2"):
        triton_lanes.gather_lanes(lanes, four[:, :3], tables, four[:, :3], lens, N, 1)
    with pytest.raises(ValueError, match="must be alike"):
        triton_lanes.gather_lanes(lanes, four.expand(2, 4), tables, four, lens, N, 1)
    order = torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="starts has 4 places, 2 requests of 2 KV heads have 5"):
        triton_lanes.lane_rows(ints([0] * 4), order, ints([0, 1, 2]), 2)
    with pytest.raises(ValueError, match="9 of 4 slots"):
        triton_lanes.lane_slots(order[None], tables, ints([0, 1, 2]), lens, 2, N, 9)
