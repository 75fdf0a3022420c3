# SPDX-License-Identifier: Apache-2.0
"""Copies of cache blocks that the scheduler orders before a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from vllm_pyramid.compat.side_channel import read_block_copies
from vllm_pyramid.step.hooks import CacheHooks
from vllm_pyramid.step.upload import upload

# vLLM gathers the blocks that are copied at once in memory of the same size.
MAX_BYTES_AT_ONCE = 64 << 20


def copy_blocks(
    scheduler_output: SchedulerOutput,
    stage: int,
    kv_caches: list[torch.Tensor],
    num_blocks: int,
    page_size_bytes: int,
    pools: Sequence[CacheHooks] = (),
) -> None:
    """Make the step's copies of blocks, in order and a limited number at once.

    vLLM's runners would make all of them at once, and need memory for all copied blocks. The order
    is removed from `scheduler_output`, and the targets from the blocks that vLLM zeroes afterwards.
    `pools` are of methods, and follow their blocks.
    """
    copies = read_block_copies(scheduler_output, stage)
    if not copies:
        return
    at_once = max(MAX_BYTES_AT_ONCE // page_size_bytes, 1)
    for start in range(0, len(copies), at_once):
        piece = list(copies[start : start + at_once])
        copy_kv_cache_blocks_inplace(kv_caches, num_blocks, piece)
        if pools:
            pairs = np.array([(one.src_block_id, one.dst_block_id) for one in piece], np.int64)
            sources, targets = upload(pairs.T.copy(), kv_caches[0].device)
            for pool in pools:
                pool.copy_blocks(sources, targets)
    scheduler_output.kv_cache_block_copies = None
    if to_zero := scheduler_output.new_block_ids_to_zero:  # with caches of several types
        filled = {copy.dst_block_id for copy in copies}
        scheduler_output.new_block_ids_to_zero = [
            block_id for block_id in to_zero if block_id not in filled
        ]
