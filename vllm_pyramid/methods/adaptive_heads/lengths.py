# SPDX-License-Identifier: Apache-2.0
"""Number of tokens that each of G KV heads of a layer keeps, from the scores of all its heads."""

from __future__ import annotations

import torch


def joint_lengths(scores: torch.Tensor, total: int, *, safe: int, sinks: int = 0) -> torch.Tensor:
    """Count each head's tokens among the `total` best of all heads (AdaKV, arXiv:2407.11550):
    `[G]`.

    Each head's `safe` best tokens come before all others. Among equal scores the lower positions
    come first, and at one position the lower heads: so heads with the same scores keep as many
    tokens, and a head's part is its best tokens by `select`. All numbers are of tokens beyond the
    first `sinks` tokens, which are kept in any case.

    Args:
        scores: `[G, n]` of n context tokens, without NaN and +inf.
        total: G * safe .. G * (n - sinks).
    """
    candidates = scores[:, sinks:]
    if not len(candidates) * safe <= total <= candidates.numel():
        raise RuntimeError(
            f"{total} tokens are to be chosen of {list(candidates.shape)} candidates, {safe} of "
            "each head"
        )
    if safe:
        candidates = candidates.masked_fill(_is_among_best(candidates, safe), torch.inf)
    by_position = candidates.T.reshape(1, -1)
    return _is_among_best(by_position, total).view(-1, len(candidates)).sum(dim=0)


def _is_among_best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return which `count` values of each row are the highest, `[rows, n]` bool; first ones win."""
    if not count:
        return torch.zeros_like(values, dtype=torch.bool)
    least = values.topk(count, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above, equal = values > least, values == least
    left = count - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= left))
