# SPDX-License-Identifier: Apache-2.0
"""The record of the queries that choose their keys. Shape legend as in `kernels/records.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Choosers:
    """The queries of a batch that choose their keys (choosers), as the host knows them.

    With this record `topn_attention` on CUDA reads nothing back from the device.

    Attributes:
        queries: `[S, 2]` int32, the request of each chooser and the query's index within that
            request: all queries of the requests whose `top_ns` is above 0 and below the number of
            keys that their last query sees.
        max_top_n: at least the largest `top_ns` of these requests.
        alone: whether every request of the batch chooses.
        workspace: float32 scratch, whose size bounds how many queries choose at once; None:
            allocate what all of them need.
    """

    queries: torch.Tensor
    max_top_n: int
    alone: bool = False
    workspace: torch.Tensor | None = None
