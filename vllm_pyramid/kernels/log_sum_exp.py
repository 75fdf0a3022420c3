# SPDX-License-Identifier: Apache-2.0
"""The sums of exponentials of a softmax, and checks that back ends share."""

from __future__ import annotations

import torch


def with_sinks(log_sum_exp: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Add the sinks `[H]`, if any, to a log-sum-exp `[..., queries]` over keys.

    The leading dimensions together are the query heads. A query that sees no key keeps its -inf.
    """
    if sinks is None:
        return log_sum_exp
    own = sinks.to(log_sum_exp.dtype).reshape(*log_sum_exp.shape[:-1], 1)
    return torch.where(log_sum_exp > -torch.inf, log_sum_exp.logaddexp(own), log_sum_exp)


def check_lse(log_sum_exp: torch.Tensor, query: torch.Tensor, *, dense: bool = False) -> None:
    """Raise ValueError unless `log_sum_exp` is float32 `[T, H]` for a query `[T, H, D]`."""
    if log_sum_exp.dtype != torch.float32 or log_sum_exp.shape != query.shape[:2]:
        raise ValueError(
            f"log_sum_exp must be float32 {list(query.shape[:2])}, [T, H] of the query, got "
            f"{log_sum_exp.dtype} {list(log_sum_exp.shape)}"
        )
    if dense and not log_sum_exp.is_contiguous():
        raise ValueError(f"log_sum_exp must be contiguous, got strides {log_sum_exp.stride()}")


def check_some_requests(num_requests: int) -> None:
    """Raise ValueError for a batch without requests, of which no result has a width."""
    if num_requests == 0:
        raise ValueError("the batch must hold at least one request, got none")


def check_scores(scores: torch.Tensor) -> None:
    """Raise ValueError unless scores are `[R, G, n]` float32 with unit stride in n."""
    if scores.dtype != torch.float32 or scores.dim() != 3 or scores.stride(2) != 1:
        raise ValueError(
            f"scores must be float32 [R, G, n] with unit stride, got {scores.dtype} "
            f"{tuple(scores.shape)} with strides {scores.stride()}"
        )
