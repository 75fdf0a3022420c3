# SPDX-License-Identifier: Apache-2.0
"""What a scorer sees: one request in one layer, at an eviction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from vllm_pyramid.kernels.gather_tokens import gather_scaled
from vllm_pyramid.kernels.reference_mass import with_sinks

if TYPE_CHECKING:
    from vllm_pyramid.step.ranks import Ranks
    from vllm_pyramid.step.rotary import Rotary


@dataclass
class ScorerInputs:
    """Keys, values and queries of one request in one layer. Everything is a copy in float32.

    Shape legend: G KV heads of this rank, H query heads of this rank (G groups of H / G), D head
    size, T tokens that the layer holds of the request, W queries.

    The first `sinks` and the last `window` of the T tokens are kept whatever their score.

    Attributes:
        num_tokens: T. window, sinks: of the policy.
        num_query_heads: H. num_kv_heads: G. head_size: D.
        first_kv_head: place of this rank's first KV head among those of all ranks.
        layer: index from the bottom. num_layers: of the model.
        scale: of the logits. soft_cap: of the logits, 0 for none.
        queries: `[W, H, D]`, rotary embedding applied: those of this step, of which the last
            stands at the last token. W is at least `window` where the scorer needs queries.
        key_cache, value_cache, block_row, start: where the tokens lie; see `keys` and `values`.
        key_scale, value_scale, key_scales, value_scales: what the caches' numbers are multiplied
            with, to give those; see `AttentionBatch`.
        logit_sinks: `[H]` learned sinks, or None.
        whole: whether nothing was evicted before: then the T tokens are the request's first ones,
            and a token's place is its position.
        last_position: of the last query. prompt_len: tokens of the prompt.
        rotary: of the layer; None where it has none. knows_rotary: whether it was asked for.
        ranks: that share the heads; None for one.
    """

    num_tokens: int
    window: int
    sinks: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    first_kv_head: int
    layer: int
    num_layers: int
    scale: float
    soft_cap: float
    queries: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_row: torch.Tensor
    start: int = 0
    key_scale: float = 1.0
    value_scale: float = 1.0
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    logit_sinks: torch.Tensor | None = None
    whole: bool = True
    last_position: int = 0
    prompt_len: int = 0
    rotary: Rotary | None = None
    knows_rotary: bool = False
    ranks: Ranks | None = None

    def _gather(
        self, cache: torch.Tensor, scale: float, scales: torch.Tensor | None
    ) -> torch.Tensor:
        end = self.start + self.num_tokens
        rows = gather_scaled(cache, scales, self.block_row, self.start, end, torch.float32)
        found = rows.transpose(0, 1)
        return found if scale == 1.0 else found * scale

    @cached_property
    def keys(self) -> torch.Tensor:
        """`[G, T, D]`, rotary embedding applied, as they are in attention."""
        return self._gather(self.key_cache, self.key_scale, self.key_scales)

    @cached_property
    def values(self) -> torch.Tensor:
        """`[G, T, D]`."""
        return self._gather(self.value_cache, self.value_scale, self.value_scales)

    @property
    def places(self) -> torch.Tensor:
        """`[T]`: 0 .. T - 1; the positions of the tokens where `whole` is true."""
        return torch.arange(self.num_tokens, device=self.queries.device)

    @property
    def query_positions(self) -> torch.Tensor:
        """`[W]` positions of `queries`."""
        first = self.last_position - len(self.queries) + 1
        return torch.arange(first, self.last_position + 1, device=self.queries.device)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_query_heads // self.num_kv_heads

    def window_queries(self, count: int | None = None) -> torch.Tensor:
        """The last `count` queries, `[count, H, D]` float32; None: the window's."""
        return self.queries[-self._count(count) :].float()

    def _count(self, count: int | None) -> int:
        """How many queries are meant.

        Raises:
            ValueError: the step does not have so many.
        """
        count = max(self.window, 1) if count is None else count
        if count > len(self.queries):
            raise ValueError(
                f"a scorer looks at {count} queries, and the step has {len(self.queries)} of this "
                "request: declare `needs_queries = True` in its class, and set `window` to as many"
            )
        return count

    def slices(self, count: int) -> list[slice]:
        """The queries, `count` at a time: what is `[H, W, T]` at once may not fit."""
        return [
            slice(i, min(i + count, len(self.queries))) for i in range(0, len(self.queries), count)
        ]

    def logits(self, count: int | None = None) -> torch.Tensor:
        """What the last `count` queries give each key before the softmax, `[H, count, T]`.

        Scaled and capped; -inf where a key comes after the query.
        """
        count = self._count(count)
        return self.logits_of(slice(len(self.queries) - count, len(self.queries)))

    def logits_of(self, which: slice) -> torch.Tensor:
        """The same of some queries, by their place in `queries`."""
        queries = self.queries[which].float()
        grouped = queries.unflatten(1, (self.num_kv_heads, self.group))
        logits = torch.einsum("wgqd,gtd->gqwt", grouped, self.keys).flatten(0, 1) * self.scale
        if self.soft_cap:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        own = torch.arange(which.start, which.stop, device=queries.device)
        later = self.places > self.num_tokens - len(self.queries) + own[:, None]
        return logits.masked_fill_(later, -math.inf)

    def attention(self, count: int | None = None) -> torch.Tensor:
        """The attention of the last `count` queries over all T keys: `[H, count, T]`."""
        count = self._count(count)
        return self.attention_of(slice(len(self.queries) - count, len(self.queries)))

    def attention_of(self, which: slice) -> torch.Tensor:
        """The same of some queries; what goes to learned sinks is missing from its sum."""
        logits = self.logits_of(which)
        total = with_sinks(logits.logsumexp(dim=-1), self.logit_sinks)
        return logits.sub_(total[..., None]).exp_()

    def unrotated_queries(self, count: int | None = None) -> torch.Tensor:
        """The last `count` queries before their rotary embedding, `[count, H, D]` float32."""
        queries = self.window_queries(count)
        self._check_rotary()
        if self.rotary is None:
            return queries
        return self.rotary.turn_back(queries, self.query_positions[-len(queries) :])

    def _check_rotary(self) -> None:
        if not self.knows_rotary:
            raise ValueError(
                "a scorer looks at what is behind the rotary embedding: declare "
                "`needs_rotary = True` in its class"
            )

    def at_future_positions(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """`x`, `[..., D]` without rotary embedding, at the next `count` positions on average."""
        self._check_rotary()
        if self.rotary is None:
            return x
        first = self.last_position + 1
        return self.rotary.mean_turn(x, torch.arange(first, first + count, device=x.device))

    def mean_of_heads(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over all query heads of all ranks: `[H, T]` to `[T]`."""
        if self.ranks is None or self.ranks.size == 1:
            return values.mean(dim=0)
        total = self.ranks.broadcast(self.ranks.all_reduce(values.sum(dim=0)))
        return total / (self.num_query_heads * self.ranks.size)

    def reduce_groups(self, values: torch.Tensor, how: str = "mean") -> torch.Tensor:
        """From one number a query head to one a KV head: `[H, T]` to `[G, T]`.

        Args:
            how: `mean`, `max` or `sum` over the query heads of a group.
        """
        grouped = values.unflatten(0, (self.num_kv_heads, self.group))
        if how == "max":
            return grouped.amax(dim=1)
        return grouped.mean(dim=1) if how == "mean" else grouped.sum(dim=1)
