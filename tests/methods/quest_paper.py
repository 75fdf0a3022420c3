# SPDX-License-Identifier: Apache-2.0
"""Quest's choice of pages, written from its paper (arXiv:2406.10774)."""

from __future__ import annotations

import torch


def quests_pages(query: torch.Tensor, keys: torch.Tensor, size: int, budget: int) -> list[int]:
    """Quest's choice for one head, from its algorithm 1: the last page and the best of the others.

    Per channel, the larger of q times the page's minimum and q times its maximum, summed.
    """
    full = (len(keys) - 1) // size
    bounds = []
    for page in range(full):
        channels = keys[page * size : (page + 1) * size]
        low, high = channels.min(dim=0).values, channels.max(dim=0).values
        bounds.append(float(torch.maximum(query * low, query * high).double().sum()))
    order = sorted(range(full), key=lambda page: (-bounds[page], page))
    return sorted([*order[: budget - 1], full])
