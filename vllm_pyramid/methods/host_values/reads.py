# SPDX-License-Identifier: Apache-2.0
"""How the requests of a step read V that is on the host. Shape legend as in `fetch.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.methods.host_values.kernels import Choosers
from vllm_pyramid.step.attention_inputs import AttentionInputs

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepRows:
    """Requests `first .. last - 1` of a step, whose V is read in one way.

    Attributes:
        most_queries, most_visible: of one of them. tokens: of the step, that are theirs.
        table: `[rows, S]` int32, their blocks in the buffer; None where V is read on the host.
        places: of `copy_pages`, the pages to fetch. slots: `[tokens]` int64 in the buffer.
    """

    first: int
    last: int
    most_queries: int
    most_visible: int
    table: torch.Tensor | None = None
    places: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    tokens: slice | None = None
    top_ns: torch.Tensor | None = None
    choosers: Choosers | None = None

    def of(self, call: AttentionInputs, **changes: Any) -> Any:
        """Return the batch of these requests; queries and outputs are those of all."""
        rows, batch = slice(self.first, self.last), call.batch
        return replace(
            batch,
            block_table=batch.block_table[rows],
            query_start_loc=batch.query_start_loc[self.first : self.last + 1],
            seq_lens=batch.seq_lens[rows],
            skips=batch.skips[rows],
            max_query_len=self.most_queries,
            max_seq_len=self.most_visible,
            **changes,
        )


@dataclass(frozen=True)
class ReadLayout:
    """A step in the layers that skip the same.

    Attributes:
        fetched, direct: how V is read.
        whole, chosen: `[R]` keys that a request's queries use: once a KV head where all are used,
            once a query head where these choose.
    """

    fetched: list[StepRows]
    direct: list[StepRows]
    whole: Numbers
    chosen: Numbers
