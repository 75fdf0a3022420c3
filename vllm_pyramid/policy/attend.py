# SPDX-License-Identifier: Apache-2.0
"""The part of a policy that says what generated tokens attend to: by default all that is held.

A part that selects keeps every token and lets each KV head of each query attend to some pages
(blocks of N tokens of one layer) alone. Prompts attend to everything.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from vllm_pyramid.plan import IntArray
from vllm_pyramid.policy.component import Component

ATTEND_KEY = "kv_attend_budget"  # of requests
# A number of pages that no sequence has: attention to everything.
ALL_PAGES = 2**31 - 1


class Attend(Component):
    """Base class of the section `attend`.

    Class attributes:
        selects: whether generated tokens attend to some pages alone.
        max_recomputed: tokens of preempted answers that a step computes again at most, beside one
            token of each request, since each takes memory; None: any number.
    """

    section: ClassVar[str] = "attend"
    selects: ClassVar[bool] = False
    max_recomputed: ClassVar[int | None] = None

    def pages(self, prompt_len: int, num_layers: int, block_size: int) -> IntArray:
        """Return how many pages a query behind the prompt reads at most: `[num_layers]` int32.

        A pure function, so that the front end, the scheduler and the workers agree.
        """
        return np.full(num_layers, ALL_PAGES, np.int32)


class DenseAttention(Attend):
    """Attend to all that is held."""

    kind: Literal["all"] = "all"
