# SPDX-License-Identifier: Apache-2.0
"""Statistics of the attention that a prompt's window pays, and the share that eviction keeps.

All back ends and devices use this plain PyTorch: a few passes over `[R, G, columns]` and one sort,
which a request needs at most once. Nothing is read back to the host.

Shapes as in `records.py`. `mass` is the result of `window_scores` with `pooling="none"`: column i
is prompt token i, and the columns behind `prompt_lens[r] - window` are not read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class WindowStatistics(NamedTuple):
    """How the window's attention is spread over the tokens before it; all `[R, G]` float32.

    With x_i the unpooled mass of the n = `prompt_lens[r] - window` context tokens and
    p_i = x_i / sum(x):

    Attributes:
        mass: sum(x), the attention that the window's queries pay to the context: the sum over
            those queries, reduced over the query heads of a KV head as the scores are. With "mean"
            it lies in 0 .. window; the rest of the window's attention goes to the window itself and
            to the layer's learned sinks.
        entropy: -sum(p_i * ln(p_i)) with 0 * ln(0) = 0, in nats: 0 (one token has all the mass) ..
            ln(n) (all tokens have the same).
        gini: the Gini coefficient sum_i((2 i - n - 1) * x_(i)) / (n * sum(x)) over the ascending
            x_(1) .. x_(n): 0 (all tokens have the same) .. 1 - 1 / n (one token has all the mass).

    If sum(x) is 0 (every probability underflowed), entropy and gini are 0.

    PyramidKV (arXiv:2406.02069) compares its pyramid, in the ablation of Table 4, with allocators
    that derive a layer's share from the entropy or the Gini coefficient of its attention.
    """

    mass: torch.Tensor
    entropy: torch.Tensor
    gini: torch.Tensor


def context_mass(mass: torch.Tensor, prompt_lens: torch.Tensor, window: int) -> torch.Tensor:
    """Return `mass` in float64, with zeros behind each request's context: `[R, G, columns]`."""
    columns = torch.arange(mass.shape[-1], device=mass.device)
    inside = columns < (prompt_lens - window)[:, None, None]
    return torch.where(inside, mass.double(), 0.0)


def window_statistics(
    mass: torch.Tensor, prompt_lens: torch.Tensor, *, window: int
) -> WindowStatistics:
    """Compute the statistics of an unpooled mass, in float64 sums.

    The Gini coefficient sorts each row, so this is too expensive for every decode step.

    Args:
        mass: `[R, G, >= max(prompt_lens) - window]`, not negative.
        prompt_lens: `[R]` int32, on the device of `mass`.
        window: number of queries that paid the attention.
    """
    x = context_mass(mass, prompt_lens, window)
    total = x.sum(dim=-1)
    safe = torch.where(total > 0, total, 1.0)
    share = x / safe[..., None]
    # Zeros add nothing here, so the columns behind the context need no mask ...
    entropy = -torch.special.xlogy(share, share).sum(dim=-1)
    # ... and in ascending order they come first: the context's ranks start behind them.
    n = (prompt_lens - window)[:, None, None].double()
    ranks = torch.arange(1, x.shape[-1] + 1, device=x.device) - (x.shape[-1] - n)
    gini = ((2 * ranks - n - 1) * share.sort(dim=-1).values).sum(dim=-1) / n[..., 0]
    return WindowStatistics(total.float(), entropy.float(), gini.float())


def kept_mass(
    mass: torch.Tensor,
    kept: torch.Tensor,
    prompt_lens: torch.Tensor,
    keeps: torch.Tensor,
    *,
    window: int,
) -> torch.Tensor:
    """Return the attention recall: the share of the context's mass that the kept tokens hold.

    This is PyramidKV's Figure 8, and XKV's retention `R_l(k) = sum(topk(w_l, k)) / sum(w_l)` if
    `mass` holds the pooled scores w_l that chose `kept`. The window, which is always kept, counts
    in neither sum.

    Args:
        mass: `[R, G, >= max(prompt_lens) - window]`, unpooled mass or scores, not negative.
        kept: `[R, G, >= max(keeps)]` int32 positions as `select` returns them, each at most once;
            entries behind `keeps[r]` are not read, those inside the window do not count.
        prompt_lens: `[R]` int32.
        keeps: `[R]` int32.
        window: tokens at the end of the prompt that are not part of the context.

    Returns:
        `[R, G]` float32 in 0 .. 1; 1 if the context has no mass at all.

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
