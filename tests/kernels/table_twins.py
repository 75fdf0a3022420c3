# SPDX-License-Identifier: Apache-2.0
"""The kernels of tables and lanes in PyTorch: oracles, and stand-ins where nothing is launched."""

from __future__ import annotations

from itertools import pairwise

import torch

from vllm_pyramid.kernels.table_records import StepRows, TableGroups


def gather_tables(
    groups: TableGroups,
    rows: StepRows,
    skips: torch.Tensor,
    row_lens: torch.Tensor,
    row_skips: torch.Tensor,
) -> None:
    """Write the tables, lengths and skips of a step."""
    lanes = groups.per_layer
    slots = list(range(len(rows.seq_lens))) if rows.slots is None else rows.slots.tolist()
    for layer in range(groups.num_evicting):
        source, target = groups.sources[layer], groups.targets[layer]
        size = groups.block_sizes[layer]
        for lane in range(len(rows.seq_lens) * lanes):
            row, head = divmod(lane, lanes)
            is_request, length = row < rows.num_reqs, int(rows.seq_lens[row])
            slot = slots[row] if is_request else row
            skip = int(skips[slot, layer * lanes + head]) if is_request else 0
            row_lens[layer, lane], row_skips[layer, lane] = max(0, length - skip), skip
            if is_request or not groups.by_slot:
                held = source[slot, head::lanes][skip // size : -(-length // size)].clone()
                target[lane, : len(held)] = held
    if rows.num_blocks is None:
        return
    for index in range(groups.num_evicting, len(groups.sources)):
        for row in range(len(rows.seq_lens)):
            if row < rows.num_reqs:
                count = int(rows.num_blocks[groups.places[index], slots[row]])
                groups.targets[index][row, :count] = groups.sources[index][slots[row], :count]
            else:
                groups.targets[index][row] = 0


def lane_rows(
    starts: torch.Tensor, order: torch.Tensor, query_starts: torch.Tensor, heads: int
) -> None:
    """Write the order of the queries of lanes."""
    place = 0
    for row, (start, end) in enumerate(pairwise(query_starts.tolist())):
        tokens = torch.arange(start, end, device=order.device)
        for head in range(heads):
            starts[row * heads + head] = place
            order[place : place + len(tokens)] = tokens * heads + head
            place += len(tokens)
    starts[(len(query_starts) - 1) * heads] = place


def lane_slots(
    slots: torch.Tensor,
    groups: TableGroups,
    rows: StepRows,
    query_starts: torch.Tensor,
    written: int,
) -> None:
    """Write the slots of the lanes' tokens."""
    heads = torch.arange(groups.per_layer, device=slots.device)
    for row, (start, end) in enumerate(pairwise(query_starts.tolist())):
        last = int(rows.seq_lens[row])
        positions = torch.arange(last - (end - start), last, device=slots.device)
        request = int(rows.slots[row]) if rows.slots is not None and end > start else row
        for layer, size in enumerate(groups.block_sizes[: len(slots)]):
            columns = (positions // size)[:, None] * groups.per_layer + heads
            found = groups.sources[layer][request][columns].long() * size
            found += (positions % size)[:, None]
            slots[layer, start * groups.per_layer : end * groups.per_layer] = found.flatten()
    slots[:, int(query_starts[-1]) * groups.per_layer : written] = -1
