# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the Triton kernels, and the scratch memory of split decode.

The shapes are fixed and not autotuned: neither a captured graph nor a first request may stop to
measure, and equal inputs must take equal paths on every rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton


def padded_head_size(head_size: int) -> int:
    """Round the head size up to a power of two, and to at least one tensor-core step."""
    return max(16, triton.next_power_of_2(head_size))


def decode_config(head_size: int, element_size: int, group: int) -> dict[str, int]:
    """Choose the tile of `decode_kernel`: about 16 KiB of K in flight per stage."""
    block_d = padded_head_size(head_size)
    block_k = max(16, min(128, 16384 // (block_d * element_size)))
    rows = max(16, triton.next_power_of_2(group))
    num_warps = 4 if rows <= 32 else 8
    if element_size == 4:
        # IEEE products run on the FMA units, whose operands must all be in registers.
        block_k = 16 if block_d >= 128 else 32
        num_warps = 8
    return {
        "ROWS": rows,
        "BLOCK_D": block_d,
        "BLOCK_K": block_k,
        "num_warps": num_warps,
        "num_stages": 2,
    }


def prefill_config(head_size: int, element_size: int) -> dict[str, int]:
    block_d = padded_head_size(head_size)
    if element_size == 4:
        return {
            "BLOCK_D": block_d,
            "BLOCK_M": 32,
            "BLOCK_K": 32,
            "num_warps": 4 if block_d <= 64 else 8,
            "num_stages": 1,
        }
    block_m, block_k = (128, 64) if block_d <= 128 else (64, 32)
    return {
        "BLOCK_D": block_d,
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
        "num_warps": 8,
        "num_stages": 2,
    }


def score_config(head_size: int, element_size: int, group: int, window: int) -> dict[str, int]:
    """Choose the tile of the window kernels: `HEADS * WINDOW_TILE` query rows, 16 to 64."""
    block_d = padded_head_size(head_size)
    if element_size == 4:
        max_rows, block_k = 16, 16  # FMA units, see `decode_config`
    else:
        max_rows, block_k = (64, 64) if block_d <= 128 else (32, 32)
    window_tile = min(max_rows, triton.next_power_of_2(window))
    heads = min(triton.next_power_of_2(group), max_rows // window_tile)
    return {
        "HEADS": max(heads, 16 // window_tile, 1),
        "WINDOW_TILE": window_tile,
        "BLOCK_D": block_d,
        "BLOCK_K": block_k,
        "num_warps": 4,
        "num_stages": 2,
    }


def recent_config(head_size: int, element_size: int) -> dict[str, int]:
    """Choose the tile of the kernels of `recent_mass`, which have many rows."""
    block_d = padded_head_size(head_size)
    size = 16 if element_size == 4 else 64 if block_d <= 128 else 32  # FMA units: `decode_config`
    warps = 8 if element_size == 4 else 4
    return {"ROWS": size, "BLOCK_D": block_d, "BLOCK_K": size, "num_warps": warps, "num_stages": 2}


@functools.cache
def target_programs(device: torch.device) -> int:
    """Return how many programs fill the device: four per multiprocessor; 4 in the interpreter."""
    if device.type != "cuda":
        return 4
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def choose_num_splits(programs: int, num_pairs: int, max_seq_len: int, block_k: int) -> int:
    """Choose the number of splits of the context: a power of two, at most 64.

    The largest that keeps `num_pairs * splits <= programs` and gives every split of the longest
    request two tiles or more. It depends only on numbers that the host knows, so a captured graph
    always replays the same launch.

    Args:
        programs: number of programs that fill the device.
        num_pairs: number of (request, KV head) pairs.
        max_seq_len: the most tokens of a request. block_k: keys of a tile.
    """
    limit = min(programs // max(num_pairs, 1), max_seq_len // (2 * block_k), 64)
    return 1 << (max(limit, 1).bit_length() - 1)


@dataclass(frozen=True)
class Workspace:
    """Scratch of split decode, allocated once and shared by all layers of one head geometry.

    `num_pairs * splits` never exceeds the number of `programs` that fill the device, so the size
    does not grow with requests. `partial_out` is `[rows, D]` float32, the other two `[rows]`.
    """

    partial_out: torch.Tensor
    partial_max: torch.Tensor
    partial_sum: torch.Tensor
    programs: int

    @staticmethod
    def allocate(
        num_query_heads: int,
        num_kv_heads: int,
        head_size: int,
        device: torch.device | str,
        rows: int | None = None,
    ) -> Workspace:
        """Allocate scratch for every batch size, or `rows` of a query head and split."""
        device = torch.device(device)
        programs = target_programs(device)
        if rows is None:
            rows = programs * (num_query_heads // num_kv_heads)
        return Workspace(
            partial_out=torch.empty(rows, head_size, dtype=torch.float32, device=device),
            partial_max=torch.empty(rows, dtype=torch.float32, device=device),
            partial_sum=torch.empty(rows, dtype=torch.float32, device=device),
            programs=programs,
        )
