# SPDX-License-Identifier: Apache-2.0
"""Number of tokens that each layer keeps, solved from the scores of all layers at once.

Sorts, sums and comparisons, without reading anything back. Each function looks at one request
alone, so a result does not depend on the batch.

Shapes: L layers, n context tokens (those before the observation window). `scores[l, i]` is the
score w_l of context token i in layer l (XKV's Eq. 3), not negative; a positive factor of a layer
does not change the result. The first `sinks` tokens are kept in any case and are not candidates,
but their score counts as kept.
"""

from __future__ import annotations

import torch

# Sums of shares differ from their exact value by rounding: a goal is reached if less is missing.
ROUNDING = 1e-9


def shares_of(scores: torch.Tensor) -> torch.Tensor:
    """Return each token's share of its layer's score, `w_l / sum(w_l)`: `[L, n]` float64.

    A layer whose scores are all 0 has shares of 0. NaN and infinity count as 0, so that a request
    whose keys overflowed gets some lengths.
    """
    exact = scores.double().nan_to_num(nan=0.0, posinf=0.0)
    total = exact.sum(dim=-1, keepdim=True)
    return exact / torch.where(total > 0, total, 1.0)


def best_lengths(scores: torch.Tensor, total: int, *, sinks: int = 0) -> torch.Tensor:
    """Find the lengths with the greatest mean R for a given total (XKV's Eq. 17): `[L]` int64.

    The paper's Algorithm 1 takes one token a step, always the largest share of any layer that is
    not taken yet, so the result is the top `total` of all shares together, lower layers first.
    Lengths and `total`, 0 .. L * (n - sinks), are of tokens beyond the sinks.
    """
    candidates = shares_of(scores)[:, sinks:].contiguous()
    if not 0 <= total <= candidates.numel():
        raise RuntimeError(
            f"{total} tokens are to be chosen of {list(candidates.shape)} candidates"
        )
    if total == 0:
        return torch.zeros(len(candidates), dtype=torch.int64, device=scores.device)
    threshold = candidates.flatten().topk(total, sorted=False).values.min()
    return _split_at(candidates, threshold, total)


def least_lengths(
    scores: torch.Tensor, goal: float, *, limit: int, at_least: int = 0, sinks: int = 0
) -> torch.Tensor:
    """Find the lengths of the least total whose mean R is at least `goal` (XKV's Eq. 18): `[L]`.

    The cumulative sums of the sorted shares give the mean R of every total. The total of all layers
    beyond the sinks is at most `limit` and at least `at_least`, whatever the goal.
    """
    shares = shares_of(scores)
    candidates = shares[:, sinks:].contiguous()
    if not 0 <= at_least <= limit <= candidates.numel():
        raise RuntimeError(
            f"{at_least} to {limit} tokens are to be chosen of {list(candidates.shape)} candidates"
        )
    if limit == 0:
        return torch.zeros(len(candidates), dtype=torch.int64, device=scores.device)
    kept_anyway = torch.where(shares.sum(dim=-1) > 0, shares[:, :sinks].sum(dim=-1), 1.0).sum()
    descending = candidates.flatten().sort(descending=True).values[:limit]
    reached = kept_anyway + torch.cat([descending.new_zeros(1), descending.cumsum(dim=0)])
    # reached[N] is L times the mean R of N tokens.
    total = (reached < goal * len(candidates) - ROUNDING).sum().clamp(at_least, limit)
    # An index without dimensions would be read back to the host.
    threshold = descending.gather(0, (total - 1).clamp(min=0)[None])[0]
    return torch.where(total > 0, _split_at(candidates, threshold, total), 0)


def _split_at(
    candidates: torch.Tensor, threshold: torch.Tensor, total: int | torch.Tensor
) -> torch.Tensor:
    """Count each layer's part of `total` tokens: all above the threshold, then equal ones."""
    above = (candidates > threshold).sum(dim=-1)
    equal = (candidates == threshold).sum(dim=-1)
    left = total - above.sum()
    before = equal.cumsum(dim=0) - equal
    return above + torch.minimum((left - before).clamp(min=0), equal)


def sum_of_heads(values: torch.Tensor) -> torch.Tensor:
    """Sum over dimension 1, one head after the other: `[S, G, ...]` to `[S, ...]`.

    The order is fixed, unlike that of `Tensor.sum`, so lengths do not depend on the batch.
    """
    total = values[:, 0].clone()
    for head in range(1, values.shape[1]):
        total += values[:, head]
    return total
