# SPDX-License-Identifier: Apache-2.0
"""What the kernels of block tables do, in PyTorch: one of the same signature for each."""

from __future__ import annotations

from itertools import pairwise

import torch


def shift_block_tables_reference_(
    tables: torch.Tensor, skips: torch.Tensor, block_size: int, num_columns: int
) -> None:
    """Shift as `shift_block_tables_`, in PyTorch."""
    for layer, row in (skips // block_size).nonzero().tolist():
        shift = int(skips[layer, row]) // block_size
        entries = tables[layer, row, :num_columns]
        moved = entries[shift:].clone()
        entries.zero_()
        entries[: moved.shape[0]] = moved


def effective_lens_reference(
    dst: torch.Tensor, seq_lens: torch.Tensor, skips: torch.Tensor, block_size: int = 1
) -> None:
    """Write as `effective_lens`, in PyTorch."""
    num_rows = skips.shape[-1]
    aligned = skips // block_size * block_size
    dst[..., :num_rows] = (seq_lens[:num_rows] - aligned).clamp_min(0)


def lane_rows_reference(
    starts: torch.Tensor, order: torch.Tensor, query_starts: torch.Tensor, heads: int
) -> None:
    """Write as `lane_rows`, in PyTorch."""
    place = 0
    for row, (start, end) in enumerate(pairwise(query_starts.tolist())):
        tokens = torch.arange(start, end, device=order.device)
        for head in range(heads):
            starts[row * heads + head] = place
            order[place : place + len(tokens)] = tokens * heads + head
            place += len(tokens)
    starts[(len(query_starts) - 1) * heads] = place


def gather_lanes_reference(
    lane_tables: torch.Tensor,
    lane_lens: torch.Tensor,
    tables: torch.Tensor,
    skips: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    num_columns: int,
) -> None:
    """Write as `gather_lanes`, in PyTorch."""
    heads = skips.shape[-1] // len(seq_lens)
    for layer, of_layer in enumerate(skips.tolist()):
        for lane, skip in enumerate(of_layer):
            row, head = divmod(lane, heads)
            held = tables[layer, row, head::heads][skip // block_size : num_columns]
            lane_tables[layer, lane, :num_columns] = 0
            lane_tables[layer, lane, : len(held)] = held
            lane_lens[layer, lane] = max(0, int(seq_lens[row]) - skip)


def lane_slots_reference(
    slots: torch.Tensor,
    tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    heads: int,
    block_size: int,
    written: int,
) -> None:
    """Write as `lane_slots`, in PyTorch."""
    num_heads = torch.arange(heads, device=slots.device)
    for row, (start, end) in enumerate(pairwise(query_starts.tolist())):
        last = int(seq_lens[row])
        positions = torch.arange(last - (end - start), last, device=slots.device)
        columns = (positions // block_size)[:, None] * heads + num_heads
        found = tables[:, row][:, columns].long() * block_size
        found += (positions % block_size)[:, None]
        slots[:, start * heads : end * heads] = found.flatten(1)
    slots[:, int(query_starts[-1]) * heads : written] = -1
