# SPDX-License-Identifier: Apache-2.0
"""The inputs of a scorer: one request in one layer, and what scorers compute from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch

from vllm_pyramid.kernels.gather_tokens import gather_scaled
from vllm_pyramid.kernels.log_sum_exp import with_sinks
from vllm_pyramid.step.eviction_memory import heads_at_once, parts_of_heads

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.attention_inputs import AttentionInputs
    from vllm_pyramid.step.ranks import Ranks
    from vllm_pyramid.step.rotary import Rotary


@dataclass
class ScorerInputs:
    """Keys, values and queries of one request in one layer, and what follows from them.

    Everything is a copy in float32.

    Shape legend: G KV heads of this rank, H query heads of this rank (G groups of H / G), D head
    size, T tokens that the layer holds of the request, W queries.

    The first `sinks` and the last `window` of the T tokens are kept whatever their score.

    Attributes:
        num_tokens: T. window, sinks: the policy's.
        num_query_heads: H. num_kv_heads: G. head_size: D.
        first_kv_head: place of this rank's first KV head among those of all ranks.
        layer: the layer's index, from the bottom. num_layers: layers of the model that evict.
        scale: scale of the logits. soft_cap: cap of the logits, 0 for none.
        queries: `[W, H, D]`, rotary embedding applied: the request's queries of this step, of which
            the last stands at the last token. W is at least `window` where the scorer needs
            queries.
        key_cache, value_cache, block_row, start: where `keys` and `values` are gathered from.
        key_scale, value_scale, key_scales, value_scales: see `AttentionBatch`.
        logit_sinks: `[H]` learned sinks, or None.
        whole: whether nothing was evicted before: then the T tokens are the request's first ones,
            and a token's place is its position.
        last_position: position of the last query. prompt_len: tokens of the prompt.
        rotary: the layer's rotary embedding; None where it has none.
        knows_rotary: whether `rotary` is set where the layer has one; see `Scorer.needs_rotary`.
        ranks: the ranks that share the heads; None for one.
        heads_at_once: KV heads of which copies are made at a time; see `parts`.
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
    asks_ranks: bool = False
    heads_at_once: int | None = None

    @classmethod
    def of_tensors(
        cls,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        window: int,
        sinks: int,
        **more: Any,
    ) -> Self:
        """Return the inputs of a whole prompt that lies in no cache, in the only layer.

        `queries` are `[W, H, D]`, `keys` and `values` `[G, T, D]`; `more` are further attributes.
        """
        (heads_kv, tokens, size), heads = keys.shape, queries.shape[1]
        derived: dict[str, Any] = {
            "num_tokens": tokens,
            "num_query_heads": heads,
            "num_kv_heads": heads_kv,
            "head_size": size,
            "first_kv_head": 0,
            "layer": 0,
            "num_layers": 1,
            "scale": size**-0.5,
            "soft_cap": 0.0,
            "key_cache": keys[None],  # one block
            "value_cache": values[None],
            "block_row": torch.zeros(1, dtype=torch.int32, device=keys.device),
            "last_position": tokens - 1,
            "prompt_len": tokens,
        }
        return cls(queries=queries, window=window, sinks=sinks, **(derived | more))

    @classmethod
    def of_request(
        cls,
        call: AttentionInputs,
        policy: Policy,
        *,
        num_layers: int,
        num_tokens: int,
        queries: torch.Tensor,
        block_row: torch.Tensor,
        start: int,
        whole: bool,
        last_position: int,
        prompt_len: int,
    ) -> Self:
        """Return one request of a layer's attention; arguments as the attributes."""
        heads = call.key_cache.shape[1]
        return cls(
            num_tokens=num_tokens,
            window=policy.window,
            sinks=policy.sinks,
            num_query_heads=call.query.shape[1],
            num_kv_heads=heads,
            head_size=call.query.shape[2],
            first_kv_head=heads * (call.ranks.rank if call.ranks is not None else 0),
            layer=call.layer,
            num_layers=num_layers,
            scale=call.softmax.scale,
            soft_cap=call.softmax.soft_cap,
            queries=queries,
            key_cache=call.key_cache,
            value_cache=call.value_cache,
            block_row=block_row,
            start=start,
            key_scale=call.batch.key_scale,
            value_scale=call.batch.value_scale,
            key_scales=call.batch.key_scales,
            value_scales=call.batch.value_scales,
            logit_sinks=call.softmax.sinks,
            whole=whole,
            last_position=last_position,
            prompt_len=prompt_len,
            rotary=call.rotary,
            knows_rotary=policy.scorer.needs_rotary,
            ranks=call.ranks,
            asks_ranks=policy.scorer.asks_ranks,
            heads_at_once=heads_at_once(
                policy, num_tokens, call.query.shape[2], call.query.shape[1] // heads
            ),
        )

    def parts(self) -> Iterator[Self]:
        """Split a long request by its KV heads; a part looks like a request with fewer of them.

        Parts depend on the request alone, not on a batch. Do not keep parts: each keeps its copies.
        """
        parts = parts_of_heads(self.num_kv_heads, self.heads_at_once or self.num_kv_heads)
        for heads in parts:
            yield self if len(parts) == 1 else self._part(heads)

    def _part(self, heads: slice) -> Self:
        queries = slice(heads.start * self.group, heads.stop * self.group)
        key_scales, value_scales, sinks = self.key_scales, self.value_scales, self.logit_sinks
        return replace(
            self,
            num_query_heads=queries.stop - queries.start,
            num_kv_heads=heads.stop - heads.start,
            first_kv_head=self.first_kv_head + heads.start,
            queries=self.queries[:, queries],
            key_cache=self.key_cache[:, heads],
            value_cache=self.value_cache[:, heads],
            key_scales=None if key_scales is None else key_scales[:, heads],
            value_scales=None if value_scales is None else value_scales[:, heads],
            logit_sinks=None if sinks is None else sinks[queries],
        )

    def _gather(
        self, cache: torch.Tensor, scale: float, scales: torch.Tensor | None
    ) -> torch.Tensor:
        end = self.start + self.num_tokens
        rows = gather_scaled(cache, scales, self.block_row, self.start, end, torch.float32)
        if scale != 1.0:
            rows.mul_(scale)
        return rows.transpose(0, 1)

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
        """The number of query heads that share a KV head."""
        return self.num_query_heads // self.num_kv_heads

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
