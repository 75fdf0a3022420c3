# SPDX-License-Identifier: Apache-2.0
"""Number of tokens that each KV head of a layer keeps, from the scores of all its heads.

Plain PyTorch, one request at a time. Shapes: G KV heads, n context tokens (those before the
observation window).
"""

from __future__ import annotations

import torch


def joint_lengths(scores: torch.Tensor, total: int, *, safe: int, sinks: int = 0) -> torch.Tensor:
    """Count each head's tokens among the `total` best of all heads (AdaKV, arXiv:2407.11550).

    Scores are compared as they are. Each head's `safe` best tokens come before all others. Among
    equal scores the lower positions come first, and at one position the lower heads: so heads with
    the same scores keep as many tokens, and a head's part is its best tokens by `select`.

    Args:
        scores: `[G, n]` of the heads of a layer, without NaN and +inf.
        total: tokens of all heads beyond the sinks, G * safe .. G * (n - sinks).
        safe: tokens that each head keeps beyond the sinks, at least.
        sinks: first tokens of the context, which are kept in any case.

    Returns:
        `[G]` int64, tokens of each head beyond the sinks.
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
