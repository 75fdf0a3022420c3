# SPDX-License-Identifier: Apache-2.0
"""The CPU operators that vLLM calls for decoder-only models and that only a CPU build carries."""

from __future__ import annotations

import numpy as np
import torch

_LIBRARIES: list[torch.library.Library] = []


def _init_cpu_memory_env(nodes: list[int]) -> None:
    """Binding memory to NUMA nodes is left to the operating system."""


def _greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    """`[R, vocabulary]` to `[R]` int64."""
    return logits.argmax(dim=-1).view(-1)


def _fused_gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Sample each row from softmax(logits), `[R, vocabulary]` float32, with the row's seed: `[R]`
    int64.

    argmax of `probability / exponential noise` is a draw from the distribution (the exponential
    form of the Gumbel trick). A row depends on its seed alone, never on its place in the batch.
    """
    noise = torch.empty_like(logits)
    generator = torch.Generator()
    for row, seed in zip(noise, seeds.tolist(), strict=True):
        row.exponential_(generator=generator.manual_seed(seed))
    return logits.softmax(dim=-1).div_(noise).argmax(dim=-1)


def define_missing_ops() -> None:
    """Register the operators once; those that exist already are left alone."""
    if _LIBRARIES:
        return
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in (
        ("init_cpu_memory_env(int[] nodes) -> ()", _init_cpu_memory_env),
        ("greedy_argmax(Tensor logits) -> Tensor", _greedy_argmax),
        ("fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor", _fused_gumbel_argmax),
    ):
        name = schema.split("(")[0]
        if hasattr(torch.ops._C, name):
            continue
        library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
    _LIBRARIES.append(library)


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    slot_mapping_ptr: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """Host version of vLLM's `ComputeSlotMappingKernel`: block * block size + row, per token.

    Works on NumPy views: a decode step maps a handful of tokens for every layer, where PyTorch's
    per-operator cost would dominate.

    Args:
        query_start_loc_ptr: `[>= R + 1]` int32. positions_ptr: `[num_tokens]` int64.
        block_table_ptr: `[max R, M]` int32.
        slot_mapping_ptr: `[max_num_tokens]` int64, written; entries behind the last token get
            `PAD_ID`.
    """
    if TOTAL_CP_WORLD_SIZE != 1:
        raise ValueError(
            "context parallelism is not supported on the CPU; unset "
            "--decode-context-parallel-size and --prefill-context-parallel-size"
        )
    slots = slot_mapping_ptr.numpy()
    positions = positions_ptr.numpy()[:num_tokens]
    table = block_table_ptr.numpy()
    starts = query_start_loc_ptr.numpy()
    num_reqs = int(np.searchsorted(starts[1:], num_tokens)) + 1 if num_tokens else 0
    rows = np.repeat(np.arange(num_reqs), np.diff(starts[: num_reqs + 1]))
    blocks = table[rows, positions // KV_CACHE_BLOCK_SIZE].astype(np.int64)
    slots[:num_tokens] = blocks * KV_CACHE_BLOCK_SIZE + positions % KV_CACHE_BLOCK_SIZE
    slots[num_tokens:] = PAD_ID
