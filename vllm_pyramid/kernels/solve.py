# SPDX-License-Identifier: Apache-2.0
"""How many tokens each layer keeps, solved from the scores of all layers at once.

Plain PyTorch for all devices: sorts, sums and comparisons, no step a token and nothing read back to
the host. Each function looks at one request alone, so a result does not depend on the batch.

Shapes: L layers, n = context tokens (those before the observation window). `scores[l, i]` is the
score w_l of context token i in layer l (XKV's Eq. 3: over window, heads and pooling), not negative;
any positive factor a layer may have been multiplied with does not matter. The first `sinks` tokens
always stay and are not candidates, but their score counts as kept.
"""

from __future__ import annotations

import torch

# Sums of shares miss their exact value by rounding: a retention is reached when less is missing.
ROUNDING = 1e-9


def shares_of(scores: torch.Tensor) -> torch.Tensor:
    """Each token's share of its layer, `w_l / sum(w_l)`: `[L, n]` to `[L, n]` float64.

    A layer without any score has shares of 0. Scores that are no numbers count as 0: a request
    whose keys overflowed gets some lengths, and the others in its batch are served.
    """
    exact = scores.double().nan_to_num(nan=0.0, posinf=0.0)
    total = exact.sum(dim=-1, keepdim=True)
    return exact / torch.where(total > 0, total, 1.0)


def retention(scores: torch.Tensor, lengths: torch.Tensor, *, sinks: int = 0) -> torch.Tensor:
    """XKV's importance retention ratio R of every layer (its Eq. 4): `[L]` float64 in 0 .. 1.

    Args:
        scores: `[L, n]`. lengths: `[L]` context tokens kept beyond the sinks, the best ones.

    Returns:
        `sum(topk(w_l, lengths[l])) / sum(w_l)`; 1 for a layer without any score.
    """
    shares = shares_of(scores)
    candidates = shares[:, sinks:].sort(dim=-1, descending=True).values
    order = torch.arange(candidates.shape[1], device=scores.device)
    kept = torch.where(order < lengths[:, None], candidates, 0.0).sum(dim=-1)
    result = kept + shares[:, :sinks].sum(dim=-1)
    return torch.where(shares.sum(dim=-1) > 0, result, 1.0)


def best_lengths(scores: torch.Tensor, total: int, *, sinks: int = 0) -> torch.Tensor:
    """The lengths with the greatest mean R for a set total (XKV's Eq. 17): `[L]` int64.

    The paper's Algorithm 1 takes one token a step, always the one that adds most to the mean. That
    token is the largest share not yet taken of all layers, so its result is the top `total` of all
    shares together. Among equal shares the lower layers are served first.

    Args:
        scores: `[L, n]`. total: tokens of all layers beyond the sinks, 0 .. L * (n - sinks).
    """
    candidates = shares_of(scores)[:, sinks:].contiguous()
    assert 0 <= total <= candidates.numel(), (total, candidates.shape)
    if total == 0:
        return torch.zeros(len(candidates), dtype=torch.int64, device=scores.device)
    threshold = candidates.flatten().topk(total, sorted=False).values.min()
    return _split_at(candidates, threshold, total)


def least_lengths(
    scores: torch.Tensor, goal: float, *, limit: int, at_least: int = 0, sinks: int = 0
) -> torch.Tensor:
    """The least total whose mean R is at least `goal` (XKV's Eq. 18): `[L]` int64.

    The sums over the sorted shares are the mean R of every total; the first that reaches the goal
    is the answer, and its lengths are those of `best_lengths` for that total.

    Args:
        scores: `[L, n]`. goal: mean R, 0 .. 1. limit: the most tokens of all layers beyond the
            sinks; where the goal needs more, these are given. at_least: the fewest of them.
    """
    shares = shares_of(scores)
    candidates = shares[:, sinks:].contiguous()
    assert 0 <= at_least <= limit <= candidates.numel(), (at_least, limit, candidates.shape)
    if limit == 0:
        return torch.zeros(len(candidates), dtype=torch.int64, device=scores.device)
    kept_anyway = torch.where(shares.sum(dim=-1) > 0, shares[:, :sinks].sum(dim=-1), 1.0).sum()
    descending = candidates.flatten().sort(descending=True).values[:limit]
    reached = kept_anyway + torch.cat([descending.new_zeros(1), descending.cumsum(dim=0)])
    # reached[N] is L times the mean R of N tokens.
    total = (reached < goal * len(candidates) - ROUNDING).sum().clamp(at_least, limit)
    # An index without dimensions would be read back.
    threshold = descending.gather(0, (total - 1).clamp(min=0)[None])[0]
    return torch.where(total > 0, _split_at(candidates, threshold, total), 0)


def _split_at(
    candidates: torch.Tensor, threshold: torch.Tensor, total: int | torch.Tensor
) -> torch.Tensor:
    """How many of `total` tokens lie in each layer: all above the threshold, then equal ones."""
    above = (candidates > threshold).sum(dim=-1)
    equal = (candidates == threshold).sum(dim=-1)
    left = total - above.sum()
    before = equal.cumsum(dim=0) - equal
    return above + torch.minimum((left - before).clamp(min=0), equal)


def minimum_budgets(scores: torch.Tensor, goal: float) -> torch.Tensor:
    """How many tokens a head needs at least to hold a share of its score: `[...]` int64.

    ZigZagKV's minimum budget size to maintain attention (MBA) for `goal` 0.9.

    Args:
        scores: `[..., n]`, not negative; zeros behind the context count nothing.
    """
    descending = shares_of(scores).sort(dim=-1, descending=True).values
    sums = descending.cumsum(dim=-1)
    needed = (sums < goal - ROUNDING).sum(dim=-1) + 1
    # A head whose scores are all 0 needs nothing; padded to a longer prompt it seems to need all.
    return torch.where(sums[..., -1] > 0, needed.clamp(max=scores.shape[-1]), 0)


def sum_of_heads(values: torch.Tensor) -> torch.Tensor:
    """The sum over dimension 1, one head after the other: `[S, G, ...]` to `[S, ...]`.

    Additions of whole tensors round alike whatever the other dimensions are; `Tensor.sum` may add
    in another order for another shape, and a request's lengths shall not depend on its batch.
    """
    total = values[:, 0].clone()
    for head in range(1, values.shape[1]):
        total += values[:, head]
    return total
