# SPDX-License-Identifier: Apache-2.0
"""Block tables of all requests in host memory that the device reads, under vLLM's second runner.

With a group for each of 32 layers these tables take 1 GiB, as much as a step's tables, and a step
reads of each row only what its layer keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.utils.platform_utils import is_uva_available


def has_host_tables() -> bool:
    """Return whether the device reads memory of the host at its addresses."""
    return is_uva_available()


def hold_on_host(block_tables: Any, groups: Sequence[int]) -> None:
    """Move the tables of these KV cache groups, which are still empty, to the host, where possible.

    Staged writes and slots go by the same addresses as before: kernels write and read them there.
    """
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    if not has_host_tables():
        return
    for group in groups:
        shape = block_tables.block_tables[group].gpu.shape
        block_tables.block_tables[group] = None  # freed before the next one takes its place
        block_tables.block_tables[group] = StagedWriteTensor(
            tuple(shape), torch.int32, block_tables.device, uva_instead_of_gpu=True
        )
    block_tables.init_block_table_layout_tensors()
    if block_tables.device.type == "cuda":
        torch.cuda.empty_cache()  # no part of a small cached block can serve a large tensor


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target in one launch; shapes are equal, and none overlap."""
    torch._foreach_copy_(list(targets), list(sources))
