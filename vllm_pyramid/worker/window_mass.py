# SPDX-License-Identifier: Apache-2.0
"""The attention of a prompt's last queries, for traces: what share of it the kept tokens hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from vllm_pyramid.config import trace_window
from vllm_pyramid.ops.recall import kept_mass
from vllm_pyramid.policy.base import Policy
from vllm_pyramid.worker.step import StepEvictions
from vllm_pyramid.worker.upload import DeviceEvictions, upload


@dataclass(frozen=True)
class WindowMass:
    """One layer's attention mass, taken before anything in it moves.

    Attributes:
        window: queries it is summed over.
        rows: `[E]` int64 on the host, which of the S requests have it: those whose prompt ends, if
            its last chunk had enough queries; fewer come only with prompts that are shorter than
            the window.
        mass: `[E, G, >= context]` float32, None if E is 0.
    """

    window: int
    rows: np.ndarray
    mass: torch.Tensor | None

    def recall(
        self, kept: torch.Tensor, prompt_lens: torch.Tensor, keeps: torch.Tensor
    ) -> torch.Tensor:
        """What the kept tokens hold, `[S, G]` float32 on the host (see `ops.recall.kept_mass`).

        NaN for prompts without mass.

        Args:
            kept: `[S, G, K]` int32. prompt_lens, keeps: `[S]` int32.
        """
        result = torch.full(kept.shape[:2], math.nan)
        if self.mass is not None:
            rows = upload(self.rows, kept.device)
            share = kept_mass(
                self.mass, kept[rows], prompt_lens[rows], keeps[rows], window=self.window
            )
            result[torch.from_numpy(self.rows)] = share.cpu()
        return result


def window_mass(
    ops: ModuleType,
    policy: Policy,
    evictions: StepEvictions,
    chosen: np.ndarray,
    device: DeviceEvictions,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    tables: torch.Tensor,
    *,
    scale: float,
    soft_cap: float,
) -> WindowMass:
    """The mass of one layer for the prompts `chosen`, `[S]` indices into the step's evictions.

    Args: see `evict.evict_layer`; `tables` are those of the chosen prompts.
    """
    window = trace_window(policy)
    lens = evictions.prompt_lens[chosen]
    at_prompt_end = np.array(evictions.numbers)[chosen] == 1
    enough = (evictions.query_lens[chosen] >= window) & (lens > window)
    rows = np.flatnonzero(at_prompt_end & enough)
    if rows.size == 0:
        return WindowMass(window, rows, None)
    index = upload(rows, query.device)
    mass = ops.window_scores(
        query,
        key_cache,
        tables[index],
        device.query_ends[index],
        device.prompt_lens[index],
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        gqa_reduce="mean",
        pooling="none",
        kernel_size=1,
        max_prompt_len=int(lens[rows].max()),
    )
    return WindowMass(window, rows, mass)
