# SPDX-License-Identifier: Apache-2.0
"""The kernels that score keys by a softmax, each as one function of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from tests.kernels.arguments import take_reduction
from vllm_pyramid.kernels.records import AttentionBatch, Softmax, WindowBatch
from vllm_pyramid.methods.thinning.kernels import RecentBatch


def windows(batch: AttentionBatch, window: int = 8, longest: int | None = None) -> WindowBatch:
    """Return the last queries of the requests, whose prompts end in this step."""
    inputs = (batch.query, batch.key_cache, batch.block_table, batch.query_start_loc[1:])
    scales = (batch.key_scale, batch.key_scales)
    return WindowBatch(*inputs, batch.seq_lens, window, longest, *scales)


def window_scores(
    module: Any, batch: AttentionBatch, softmax: Softmax, *, window: int = 8, **options: Any
) -> torch.Tensor:
    prompts = windows(batch, window, options.pop("max_prompt_len", None))
    found: torch.Tensor = module.window_scores(prompts, softmax, take_reduction(options), **options)
    return found


def key_mass(
    module: Any, batch: AttentionBatch, softmax: Softmax, *, start: float = 0.0, **options: Any
) -> torch.Tensor:
    """Return the mass in its pages, which begins at `start` everywhere."""
    mass = torch.full(batch.key_cache.shape[:3], start, device=batch.query.device)
    module.add_key_mass(mass, batch, softmax, **options)
    return mass


def recents_of(batch: AttentionBatch, max_context: int | None = None) -> RecentBatch:
    """A fifth of a request's queries are recent; their context is the keys of the others."""
    queries = batch.query_start_loc.diff()
    recents = (queries // 5).clamp(min=1)
    return RecentBatch(
        *(batch.query, batch.key_cache, batch.block_table, batch.query_start_loc[1:].clone()),
        *(batch.seq_lens, batch.skips, recents, queries - recents, max_context),
        key_scale=batch.key_scale,
        key_scales=batch.key_scales,
    )


def recent_mass(
    module: Any, batch: AttentionBatch, softmax: Softmax, **options: Any
) -> torch.Tensor:
    recent = recents_of(batch, options.pop("max_context", None))
    found: torch.Tensor = module.recent_mass(recent, softmax, **{"distance_weight": 1.2, **options})
    return found


@dataclass(frozen=True)
class Reader:
    """A kernel, and the requests that its tests are about.

    Attributes:
        run: of a back end, a batch and a softmax, and options of the kernel's own.
        lens, queries: of the requests. near: tolerances. shapes: groups and head sizes.
    """

    run: Callable[..., torch.Tensor]
    lens: tuple[int, ...]
    queries: tuple[int, ...]
    near: dict[str, float]
    shapes: tuple[tuple[int, int], ...]


READERS = {
    "window scores": Reader(
        *(window_scores, (1100, 57, 300), (20, 16, 9), {"rtol": 1e-4, "atol": 1e-9}),
        tuple(product((1, 4, 8), (32, 40, 64, 128, 512))),
    ),
    "key mass": Reader(
        *(key_mass, (1, 37, 300, 700, 20), (1, 5, 90, 1, 0), {"rtol": 1e-4, "atol": 1e-6}),
        tuple(product((1, 4, 8), (40, 64, 128, 512))),
    ),
    "recent mass": Reader(
        *(recent_mass, (9, 41, 300, 700, 37), (9, 30, 250, 500, 1)),
        {"rtol": 2e-4, "atol": 1e-7},
        ((1, 40), (4, 64), (7, 128), (2, 256), (3, 512)),
    ),
}
