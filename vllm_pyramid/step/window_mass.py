# SPDX-License-Identifier: Apache-2.0
"""The attention mass of a prompt's last queries, for traces: what share the kept tokens hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_pyramid.kernels.recall import kept_mass
from vllm_pyramid.kernels.records import Reduction, WindowBatch
from vllm_pyramid.step.upload import upload

if TYPE_CHECKING:
    from vllm_pyramid.step.eviction_batch import EvictionBatch


@dataclass(frozen=True)
class WindowMass:
    """One layer's attention mass, computed before its tokens move.

    Attributes:
        window: queries that the mass is summed over.
        rows: `[E]` int64 on the host, which of the S requests have a mass: those whose prompt ends
            and was whole, and has more tokens than the window.
        mass: `[E, G, >= context]` float32, None if E is 0.
    """

    window: int
    rows: np.ndarray
    mass: torch.Tensor | None

    def recall(
        self, kept: torch.Tensor, prompt_lens: torch.Tensor, keeps: torch.Tensor
    ) -> torch.Tensor:
        """Return the kept tokens' share (`kernels.recall.kept_mass`), `[S, G]` float32; NaN without
        a mass.

        `kept` is `[S, G, K]` int32, `prompt_lens` and `keeps` `[S]` int32.
        """
        result = torch.full(kept.shape[:2], math.nan)
        if self.mass is not None:
            rows = upload(self.rows, kept.device)
            share = kept_mass(
                self.mass, kept[rows], prompt_lens[rows], keeps[rows], window=self.window
            )
            result[torch.from_numpy(self.rows)] = share.cpu()
        return result


def window_mass(batch: EvictionBatch) -> WindowMass:
    """Compute the mass of one layer for the requests of `batch`."""
    call, evictions, window = batch.call, batch.evictions, batch.policy.trace_window
    lens, is_first = evictions.points, evictions.eviction_numbers == 1
    has_queries = (evictions.query_lens >= window) & (lens > window)
    has_mass = is_first & evictions.at_prompt_end & has_queries
    rows = np.flatnonzero(has_mass[batch.shortened])
    lens = lens[batch.shortened]
    if rows.size == 0:
        return WindowMass(window, rows, None)
    index = upload(rows, call.query.device)
    prompts = WindowBatch(
        call.query,
        call.key_cache,
        batch.tables[index],
        batch.query_ends[index],
        batch.lens[index],
        window,
        max_prompt_len=int(lens[rows].max()),
        key_scale=call.key_scale,
        key_scales=call.key_scales,
    )
    mass = call.ops.window_scores(
        prompts, call.softmax, Reduction("mean", pooling="none", kernel_size=1)
    )
    return WindowMass(window, rows, mass)
