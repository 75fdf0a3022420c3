# SPDX-License-Identifier: Apache-2.0
"""The kernels of `observed_expected`, in plain PyTorch, C++ and Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.kernels.records import Softmax, WindowBatch
from vllm_pyramid.step.rotary import Rotary


@dataclass(frozen=True)
class ScoreShape:
    """Which tokens of a request are scored, and how the two scores become one.

    Attributes:
        sinks: first tokens of a request that stay. They are pooled, and nothing else of them
            counts.
        window: last tokens that stay, at least as many as queries. They count in the softmax alone.
        kernel_size: width of the pooling in tokens, odd.
        expected: weight of the second score; 0 leaves it out.
    """

    sinks: int
    window: int
    kernel_size: int = 21
    expected: float = 0.25

    def __post_init__(self) -> None:
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size {self.kernel_size} must be positive and odd")
        if min(self.sinks, self.window, self.expected) < 0:
            raise ValueError(
                f"sinks {self.sinks}, window {self.window} and expected {self.expected} must not "
                "be negative"
            )


class ObservedExpectedOps(Protocol):
    """The kernels of one device type that score by two sums; the rules are those of `Ops`.

    Shape legend as in `kernels/records.py`; W queries of each request score.
    """

    def future_queries(
        self,
        query: torch.Tensor,
        query_ends: torch.Tensor,
        last_positions: torch.Tensor,
        rotary: Rotary | None,
        *,
        queries: int,
        positions: int,
    ) -> torch.Tensor:
        """Turn the last queries of each request to the positions to come: `[R, H, W, D]` float32.

        The rotary embedding of a query at position p is undone; then the query is rotated by the
        mean of the rotations at the next `positions` positions behind the request's last one.
        Positions behind the end of the embedding's table count as its last one.

        Args:
            query: `[T, H, D]` after the rotary embedding.
            query_ends: `[R]` int32; the queries of r are the rows `query_ends[r] - W ..
                query_ends[r] - 1`.
            last_positions: `[R]` int32, the position of each request's last query.
            rotary: the layer's embedding; None where it has none, and queries stay as they are.
            queries: W.

        Raises:
            ValueError: there is no request.
        """

    def observed_expected_scores(
        self,
        batch: WindowBatch,
        value_cache: torch.Tensor,
        softmax: Softmax,
        shape: ScoreShape,
        *,
        future: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Score the tokens by what the last queries attend to, and future ones are expected to.

        Let request r hold the tokens `start .. n - 1`, and let its tokens between `start + sinks`
        and `n - shape.window` be inside. For each KV head with its Q query heads:

            observed[t] = sum over the W queries, mean over the heads of softmax(q k_t)
            pooled[t]   = mean of observed[u] |v_u|_1 over the `kernel_size` tokens u around t
            a[h, w, t]  = softmax.scale * future[r, h, w] k_t
            b[h, t]     = mean over w of a[h, w, t] + half its variance over w
            expected[t] = |v_t|_2 * mean over the heads of softmax(b[h])[t]
            score[t]    = pooled[t] / sum(pooled) + shape.expected * expected[t] / sum(expected)

        The first softmax is that of `window_scores`: causal, over all tokens of the request, capped
        and with sinks. Its tokens before `n - shape.window` are pooled with zeros around them. The
        second one is over the tokens `start + sinks .. n - 1`, without a cap and with learned
        sinks; the variance divides by W. Sums are over the tokens inside, and at least 1e-30.

        That is the normal distribution of Expected Attention (arXiv:2510.00636): the mean over w of
        a is the product with the mean query, and its variance is k S k times the scale's square.

        Args:
            batch: its `window` is W. `prompt_lens` are n, and count from the first token of the
                table's first block. Its `key_scale` counts in both softmaxes.
            value_cache: `[P, G, N, D]`, as the key cache. A factor of all its numbers cancels.
            softmax: its sliding window is ignored.
            shape: its `window` is at least W.
            future: `[R, H, W, D]` float32 from `future_queries`, contiguous; required where
                `shape.expected` is not 0, and not read otherwise.
            value_scales: as `WindowBatch.key_scales`, of V; not in C++.
            starts: `[R]` int32, the first token of each request, below `prompt_lens` and within the
                table's first block. Whatever is in the slots before it reaches no score. None: 0.

        Returns:
            `[R, G, max(prompt_lens)]` float32: 0 for tokens that are not inside, and -inf before
            `start` and from n on.

        Raises:
            ValueError: the batch holds no request, `shape.window` is below W, or `future` is
                missing or has another shape.
        """


def observed_expected_ops(ops: Ops) -> ObservedExpectedOps:
    return ops.of_method(__name__)
