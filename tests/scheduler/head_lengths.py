# SPDX-License-Identifier: Apache-2.0
"""Heads with any lengths, for machines that count blocks."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vllm_pyramid.methods.streaming_heads import StreamingHeads
from vllm_pyramid.plan import Budget, EvictionPoint, RetentionPlan
from vllm_pyramid.policy import Policy
from vllm_pyramid.policy.heads import Heads

KIND, SOME_KIND = f"{__name__}:AnyLengths", f"{__name__}:SomeLengths"
CHUNKED_KIND = f"{__name__}:ChunkedHeads"


class AnyLengths(Heads):
    """Keep everything, nothing or something in each lane, as its number and the prompt draw it."""

    splits: ClassVar[bool] = True
    kind: str = KIND

    def plan(
        self, policy: Policy, prompt_len: int, num_lanes: int, block_size: int, budget: Budget
    ) -> RetentionPlan:
        random = np.random.default_rng((prompt_len, num_lanes))
        keep = random.integers(1, prompt_len + 1, num_lanes)
        whole = self.keeps_everything(num_lanes)
        keep = np.where((random.random(num_lanes) < 0.3) | whole, prompt_len, keep)
        mean = -(-int(keep.sum()) // num_lanes)
        end = EvictionPoint.of(prompt_len, block_size, mean, keep, policy.fill_blocks)
        return RetentionPlan((end,), whole=whole)


class SomeLengths(AnyLengths):
    """The same, but for every second lane, which never evicts."""

    kind: str = SOME_KIND

    def keeps_everything(self, num_lanes: int) -> npt.NDArray[np.bool_]:
        return np.arange(num_lanes) % 2 == 0


class ChunkedHeads(StreamingHeads):
    """Streaming heads of any model, for requests with any budget: every second head streams."""

    kind: str = CHUNKED_KIND

    @property
    def kept_tokens(self) -> tuple[int, int]:
        return 2, 5

    def check_budget(self, *args: Any) -> None:
        pass

    def prepare_args(self, *args: Any) -> None:
        pass

    def check_config(self, *args: Any) -> None:
        pass
