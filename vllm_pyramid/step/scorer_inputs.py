# SPDX-License-Identifier: Apache-2.0
"""The inputs of a scorer: one request in one layer, and what scorers compute from it."""

from __future__ import annotations

import math

import torch

from vllm_pyramid.kernels.log_sum_exp import with_sinks
from vllm_pyramid.step.scored_request import ScoredRequest


class ScorerInputs(ScoredRequest):
    """What scorers ask of a request: logits and attention, queries and keys without their rotary
    embedding, and reductions over heads. Shape legend and attributes as in `ScoredRequest`."""

    def window_queries(self, count: int | None = None) -> torch.Tensor:
        """Return the last `count` queries, `[count, H, D]` float32; None: the window's."""
        return self.queries[-self._count(count) :].float()

    def _count(self, count: int | None) -> int:
        """Return `count`, or the window's queries for None; ValueError if the step has fewer."""
        count = max(self.window, 1) if count is None else count
        if count > len(self.queries):
            raise ValueError(
                f"a scorer looks at {count} queries, and the step has {len(self.queries)} of this "
                "request: declare `needs_queries = True` in its class, and set `window` to as many"
            )
        return count

    def slices(self, count: int) -> list[slice]:
        """Split the queries into `count` at a time, where `[H, W, T]` might not fit into memory."""
        return [
            slice(i, min(i + count, len(self.queries))) for i in range(0, len(self.queries), count)
        ]

    def logits(self, count: int | None = None) -> torch.Tensor:
        """Return the logits of the last `count` queries and all keys, `[H, count, T]`.

        Scaled and capped; -inf where a key comes after the query.
        """
        count = self._count(count)
        return self.logits_of(slice(len(self.queries) - count, len(self.queries)))

    def logits_of(self, which: slice) -> torch.Tensor:
        """Return the logits of some queries, by their place in `queries`; as of `logits`."""
        logits = self._logits_with(self.queries[which].float())
        query_places = torch.arange(which.start, which.stop, device=logits.device)
        later = self.places > self.num_tokens - len(self.queries) + query_places[:, None]
        return logits.masked_fill_(later, -math.inf)

    def _logits_with(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the scaled and capped logits of queries `[n, H, D]` and all keys: `[H, n, T]`."""
        grouped = queries.unflatten(1, (self.num_kv_heads, self.group))
        logits = torch.einsum("wgqd,gtd->gqwt", grouped, self.keys).flatten(0, 1) * self.scale
        if self.soft_cap:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits

    def attention(self, count: int | None = None) -> torch.Tensor:
        """Return the attention of the last `count` queries to all T keys: `[H, count, T]`."""
        count = self._count(count)
        return self.attention_of(slice(len(self.queries) - count, len(self.queries)))

    def attention_of(self, which: slice) -> torch.Tensor:
        """Return the attention of some queries, which sums to less than 1 with learned sinks."""
        return self._normalised(self.logits_of(which))

    def attention_with(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the attention of made-up queries, `[n, H, D]`, which see all keys: `[H, n, T]`."""
        return self._normalised(self._logits_with(queries))

    def _normalised(self, logits: torch.Tensor) -> torch.Tensor:
        total = with_sinks(logits.logsumexp(dim=-1), self.logit_sinks)
        return logits.sub_(total[..., None]).exp_()

    def unrotated_queries(self, count: int | None = None) -> torch.Tensor:
        """Return the last `count` queries without rotary embedding, `[count, H, D]` float32."""
        queries = self.window_queries(count)
        self._check_rotary()
        if self.rotary is None:
            return queries
        return self.rotary.turn_back(queries, self.query_positions[-len(queries) :])

    def _check_rotary(self) -> None:
        if not self.knows_rotary:
            raise ValueError(
                "a scorer looks at queries or keys without their rotary embedding: declare "
                "`needs_rotary = True` in its class"
            )

    def at_future_positions(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """Return the mean of `x`, `[..., D]`, rotated to each of the next `count` positions."""
        self._check_rotary()
        if self.rotary is None:
            return x
        first = self.last_position + 1
        return self.rotary.mean_turn(x, torch.arange(first, first + count, device=x.device))

    def future_queries(self, count: int) -> torch.Tensor:
        """Return the last `count` queries at the next `count` positions: `[count, H, D]`."""
        queries = self.unrotated_queries(count)
        if self.rotary is None:
            return queries
        first = self.last_position + 1
        positions = torch.arange(first, first + count, device=queries.device)
        cos, sin = self.rotary.at(positions.clamp(max=len(self.rotary.cos_sin) - 1))
        return self.rotary.turn(queries, cos[:, None], sin[:, None])

    def mean_of_heads(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over all query heads of all ranks: `[H, T]` to `[T]`.

        ValueError: the scorer does not say that it asks the ranks.
        """
        if not self.asks_ranks:
            raise ValueError(
                "a scorer takes the mean of all ranks' heads: declare `asks_ranks = True` in its "
                "class"
            )
        if self.ranks is None or self.ranks.size == 1:
            return values.mean(dim=0)
        total = self.ranks.broadcast(self.ranks.all_reduce(values.sum(dim=0)))
        return total / (self.num_query_heads * self.ranks.size)

    def reduce_groups(self, values: torch.Tensor, how: str = "mean") -> torch.Tensor:
        """Reduce query heads to KV heads by `mean`, `max` or `sum`: `[H, T]` to `[G, T]`."""
        grouped = values.unflatten(0, (self.num_kv_heads, self.group))
        if how == "max":
            return grouped.amax(dim=1)
        return grouped.mean(dim=1) if how == "mean" else grouped.sum(dim=1)
