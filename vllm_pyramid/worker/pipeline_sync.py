# SPDX-License-Identifier: Apache-2.0
"""Messages between the workers of pipeline stages: their layers at start-up, then evictions.

    stage 0                stage 1                 the last stage
    evicts in its layers   evicts in its layers    evicts in its layers
    tokens  -------------> + its own  -----------> + its own  -> report to the scheduler

The scheduler receives the report of the last stage alone. So the evicted tokens of a step are
summed over the stages, and the scheduler notices if a stage has evicted nothing. Which of the
requests have failed travels along. All stages come to the same evictions in the same step, so each
knows when to send and when to receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_pyramid.step.failures import KINDS
from vllm_pyramid.step.step_evictions import StepEvictions

_TAG = 417  # distinct from vLLM's messages between stages


class PipelineSync:
    """One worker's place in the pipeline.

    Args:
        group: vLLM's group of the pipeline's ranks, with one worker of each stage.
        in_flight: the greatest number of steps that are under way at once.

    Attributes:
        stage: this worker's stage, from 0. count: the number of stages.
    """

    def __init__(self, group: Any, in_flight: int) -> None:
        self.stage, self.count = group.rank_in_group, group.world_size
        self._ranks, self._group = group.ranks, group.cpu_group
        self._in_flight = in_flight
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    @property
    def is_last(self) -> bool:
        """Whether the scheduler receives this stage's report."""
        return self.stage == self.count - 1

    def layers_of_all(
        self, specs: Mapping[str, KVCacheSpec], readers: Mapping[str, str]
    ) -> list[tuple[Mapping[str, KVCacheSpec], Mapping[str, str]]]:
        """Return the layers of each stage, and those of them that read others' caches.

        All workers call this at the same time.
        """
        of_this_stage = dict(specs), dict(readers)
        if self.count == 1:
            return [of_this_stage]
        of_all_stages: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(of_all_stages, of_this_stage, group=self._group)
        return of_all_stages

    def sum_over_stages(self, evictions: StepEvictions) -> None:
        """Add the evicted tokens of the stages before this one, and send the sum to the next.

        Failed requests are sent, too. Failures that a device has flagged are waited for, but by the
        last stage, which sends its own with the step's tokens.
        """
        if self.count == 1:
            return
        if not self.is_last:
            evictions.failures.wait()
        # Requests may have another order in the batch of another stage.
        order = np.argsort(evictions.request_ids)
        names = [evictions.request_ids[index] for index in order]
        if self.stage > 0:
            before = torch.empty(1 + len(KINDS), len(order), dtype=torch.int64)
            source = self._ranks[self.stage - 1]
            torch.distributed.recv(before, src=source, group=self._group, tag=_TAG)
            evictions.tokens_done[order] += before[0].numpy()
            evictions.failures.add_from_host(names, before[1:].numpy())
        if self.is_last:
            return
        failed = evictions.failures.on_host(names)
        message = torch.from_numpy(np.concatenate([evictions.tokens_done[order][None], failed]))
        target = self._ranks[self.stage + 1]
        work = torch.distributed.isend(message, dst=target, group=self._group, tag=_TAG)
        self._sent.append((work, message))
        # A message must live until it has arrived, as that of `in_flight` steps ago has.
        while len(self._sent) > self._in_flight:
            self._sent.popleft()[0].wait()
