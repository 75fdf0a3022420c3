# SPDX-License-Identifier: Apache-2.0
"""The share of the attention of a prompt's window that eviction keeps, in plain PyTorch."""

from __future__ import annotations

import torch


def context_mass(mass: torch.Tensor, prompt_lens: torch.Tensor, window: int) -> torch.Tensor:
    """Return `mass` in float64, with zeros behind each request's context: `[R, G, columns]`."""
    columns = torch.arange(mass.shape[-1], device=mass.device)
    inside = columns < (prompt_lens - window)[:, None, None]
    return torch.where(inside, mass.double(), 0.0)


def kept_mass(
    mass: torch.Tensor,
    kept: torch.Tensor,
    prompt_lens: torch.Tensor,
    keeps: torch.Tensor,
    *,
    window: int,
) -> torch.Tensor:
    """Return the attention recall, `[R, G]` float32: the share of the context's mass in kept
    tokens.

    This is PyramidKV's Figure 8, and XKV's retention `R_l(k) = sum(topk(w_l, k)) / sum(w_l)` if
    `mass` holds the pooled scores w_l that chose `kept`. The window, which is always kept, counts
    in neither sum; without mass in the context the recall is 1. Nothing is read back to the host.

    Args:
        mass: `[R, G, >= max(prompt_lens) - window]`, not negative; columns behind `prompt_lens[r] -
            window` are not read.
        kept: `[R, G, >= max(keeps)]` int32 positions as `select` returns them, each at most once;
            entries behind `keeps[r]` are not read, those inside the window do not count.
        prompt_lens, keeps: `[R]` int32.

    Raises:
        ValueError: the shapes do not fit one another.
    """
    if mass.dim() != 3 or kept.dim() != 3 or mass.shape[:2] != kept.shape[:2]:
        raise ValueError(
            f"mass {tuple(mass.shape)} and kept {tuple(kept.shape)} must be [R, G, columns] with "
            "the same R and G"
        )
    requests = mass.shape[0]
    if prompt_lens.shape != (requests,) or keeps.shape != (requests,):
        raise ValueError(
            f"prompt_lens {tuple(prompt_lens.shape)} and keeps {tuple(keeps.shape)} must be "
            f"[{requests}], one entry a request of mass"
        )
    x = context_mass(mass, prompt_lens, window)
    total = x.sum(dim=-1)
    order = torch.arange(kept.shape[-1], device=kept.device)
    positions = kept.long()
    counted = (order < keeps[:, None, None]) & (positions < (prompt_lens - window)[:, None, None])
    held = x.gather(-1, torch.where(counted, positions, 0))
    share = torch.where(counted, held, 0.0).sum(dim=-1) / torch.where(total > 0, total, 1.0)
    return torch.where(total > 0, share, 1.0).float()
