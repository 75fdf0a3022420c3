# SPDX-License-Identifier: Apache-2.0
"""Where V lies in host memory: how many keys each request of a step uses, and what that moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_pyramid.swap.traffic import StepTraffic

IntArray = npt.NDArray[np.int32]


@dataclass
class StepChoice:
    """How many keys the step's requests take V of, and what was taken.

    Attributes:
        request_ids: R names, in batch order. scheduled: `[R]` int32, tokens of the step.
        past_prompt: `[R]` bool, whether these come behind the prompt.
        top_ns: `[R]` int32, see `ops.topn_attention`; 0 while the prompt is processed.
        value_rows: `[R]` int64, rows of V that were needed so far, added to by the layers.
    """

    request_ids: Sequence[str]
    scheduled: IntArray
    past_prompt: npt.NDArray[np.bool_]
    top_ns: IntArray
    value_rows: npt.NDArray[np.int64]

    def traffic(self, row_bytes: int, rows_of_token: int) -> StepTraffic:
        """What the step moved. `row_bytes` of V are of a KV head and token; all layers of a token
        have `rows_of_token`.
        """
        scheduled = self.scheduled.astype(np.int64)
        return StepTraffic(
            list(self.request_ids),
            (scheduled * (rows_of_token * row_bytes)).tolist(),
            (self.value_rows * row_bytes).tolist(),
            (scheduled * self.past_prompt).tolist(),
        )
