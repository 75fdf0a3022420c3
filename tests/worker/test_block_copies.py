# SPDX-License-Identifier: Apache-2.0
"""Blocks that a step begins with: copied before the step, and not zeroed afterwards."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

from vllm_pyramid.compat.side_channel import attach_block_copies
from vllm_pyramid.step.hooks import CacheHooks
from vllm_pyramid.worker import block_copies
from vllm_pyramid.worker.block_copies import copy_blocks


class Pool(CacheHooks):
    """A number for each block."""

    def __init__(self) -> None:
        self.numbers = torch.arange(6)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.numbers[targets] = self.numbers[sources]


def copied(output: Any, stage: int, *pools: Pool) -> list[float]:
    """Return the contents of six blocks, which held their own ids, after the step's copies."""
    caches = [torch.arange(6.0).repeat_interleave(16).view(6, 16).clone()]
    copy_blocks(output, stage, caches, num_blocks=6, page_size_bytes=64, pools=pools)
    contents: list[float] = caches[0][:, 0].tolist()
    return contents


@pytest.mark.parametrize("at_once", [1, 64])
def test_what_was_copied_is_not_zeroed(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """vLLM zeroes new blocks where caches are of several types, and would do so afterwards."""
    monkeypatch.setattr(block_copies, "MAX_BYTES_AT_ONCE", at_once * 64)
    output: Any = SimpleNamespace(
        kv_cache_block_copies=[KVCacheBlockCopy(1, 3), KVCacheBlockCopy(2, 4)],
        new_block_ids_to_zero=[3, 5, 4],
    )
    pool = Pool()
    assert copied(output, 0, pool) == [0, 1, 2, 1, 2, 5]
    assert pool.numbers.tolist() == [0, 1, 2, 1, 2, 5], "what is kept of blocks follows them"
    assert output.kv_cache_block_copies is None
    assert output.new_block_ids_to_zero == [5]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_copies_its_own_blocks(stage: int) -> None:
    """A block id belongs to a pool, and each pipeline stage has its own pool."""
    copies = [[KVCacheBlockCopy(1, 3)], [KVCacheBlockCopy(2, 3), KVCacheBlockCopy(5, 4)]]
    output: Any = SimpleNamespace(kv_cache_block_copies=None, new_block_ids_to_zero=None)
    attach_block_copies(output, copies)
    assert output.kv_cache_block_copies is None, "it would go to all stages"
    received = pickle.loads(pickle.dumps(output))  # as on the way to a worker
    expected = ([0, 1, 2, 1, 4, 5], [0, 1, 2, 2, 5, 5])
    assert copied(received, stage) == expected[stage]
