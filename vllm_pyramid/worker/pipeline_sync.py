# SPDX-License-Identifier: Apache-2.0
"""What the workers of pipeline stages tell each other: their layers at start-up, then evictions.

    stage 0                stage 1                 the last stage
    evicts in its layers   evicts in its layers    evicts in its layers
    tokens  -------------> + its own  -----------> + its own  -> report to the scheduler

The scheduler hears the last stage alone. So what a step evicts is summed on the way, and its word
stands for all: a stage that evicts nothing is missed in the sum. All stages come to the same
evictions in the same step, so each knows by itself when there is something to send or to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_pyramid.step.step import StepEvictions

_TAG = 417  # apart from vLLM's messages between stages


class PipelineSync:
    """One worker's place in the pipeline.

    Args:
        group: vLLM's of the pipeline's ranks, with one worker of each stage.
        in_flight: steps that are under way at once, at most.
    """

    def __init__(self, group: Any, in_flight: int) -> None:
        self.stage, self.count = group.rank_in_group, group.world_size
        self._ranks, self._group = group.ranks, group.cpu_group
        self._in_flight = in_flight
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    @property
    def is_last(self) -> bool:
        """Whether the scheduler hears this stage."""
        return self.stage == self.count - 1

    def layers_of_all(
        self, specs: Mapping[str, KVCacheSpec], readers: Mapping[str, str]
    ) -> list[tuple[Mapping[str, KVCacheSpec], Mapping[str, str]]]:
        """The layers of each stage, and those of them that read others' caches.

        Every worker calls this at the same time.
        """
        own = dict(specs), dict(readers)
        if self.count == 1:
            return [own]
        found: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(found, own, group=self._group)
        return found

    def all_reduce(self, evictions: StepEvictions) -> None:
        """Add what the stages before evicted to what this one did, and tell the next."""
        if self.count == 1:
            return
        # Batches of two stages may have their requests in another order.
        order = np.argsort(evictions.request_ids)
        if self.stage > 0:
            before = torch.empty(len(order), dtype=torch.int64)
            source = self._ranks[self.stage - 1]
            torch.distributed.recv(before, src=source, group=self._group, tag=_TAG)
            evictions.tokens_done[order] += before.numpy()
        if self.is_last:
            return
        own = torch.from_numpy(evictions.tokens_done[order])
        target = self._ranks[self.stage + 1]
        work = torch.distributed.isend(own, dst=target, group=self._group, tag=_TAG)
        self._sent.append((work, own))
        # A message must live until it has arrived; that of so many steps ago has.
        while len(self._sent) > self._in_flight:
            self._sent.popleft()[0].wait()
