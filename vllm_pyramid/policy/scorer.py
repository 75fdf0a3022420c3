# SPDX-License-Identifier: Apache-2.0
"""The contract of a scorer: it says how important each cached key of a layer is."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.component import Component

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.eviction_batch import EvictionBatch
    from vllm_pyramid.step.scorer_inputs import ScorerInputs


class Scorer(Component):
    """Base class of scorers. Most override `score` and nothing else.

    Class attributes:
        evicts: False only for the scorer that ranks nothing, so that nothing can be evicted.
        needs_queries: `score` uses queries; the scheduler then puts the last `window` queries of a
            prompt into one chunk, with all keys in the cache.
        keeps_queries: `score` uses queries of earlier steps too, which a hook of the scorer keeps,
            so it may evict while generating.
        needs_positions: `score` uses the positions of keys, which are known at a request's first
            eviction only: survivors do not remember theirs. (Positions of queries are known.)
        needs_rotary: `score` undoes the rotary embedding (`ScorerInputs.rotary`).
        looks_ahead: `score` rotates to positions behind the model's last one
            (`Rotary.mean_turn_ahead`), which needs an embedding of known frequencies.
        attention_mass: the scores are attention, so they are not negative and a key's share of a
            layer's sum is its share of the attention. Allocators that defer need this.
        asked: the function that a user's class defines.
        joins_layers: `scores` takes rows of several layers, see `EvictionBatch.layers`.
        asks_ranks: `score` calls `ScorerInputs.mean_of_heads`, for which tensor-parallel ranks wait
            for one another.
        in_parts: a long request may be scored some KV heads at a time, so that the copies of its
            keys stay small. Only for a `score` that looks at each KV head by itself.
        workspace_bytes: bytes that `score` takes in addition to `floats_per_key`.
    """

    section: ClassVar[str] = "scorer"
    evicts: ClassVar[bool] = True
    needs_queries: ClassVar[bool] = False
    keeps_queries: ClassVar[bool] = False
    needs_positions: ClassVar[bool] = False
    needs_rotary: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = False
    attention_mass: ClassVar[bool] = False
    joins_layers: ClassVar[bool] = False
    asks_ranks: ClassVar[bool] = False
    in_parts: ClassVar[bool] = False
    workspace_bytes: ClassVar[int] = 0
    asked: ClassVar[str] = "score"

    @property
    def history(self) -> int | None:
        """How many of the last queries before an eviction count; None: all of them."""
        return None

    def gathers(self, policy: Policy) -> bool:
        """Return whether every step adds up what queries give to keys."""
        return False

    @property
    def copies_keys(self) -> bool:
        """Whether requests are scored by `score`, from float32 copies, and not by a kernel."""
        return self.evicts and type(self).scores is Scorer.scores

    def queries_at_step_end(self, policy: Policy) -> int | None:
        """Return how many of a request's last queries `scores` needs for all layers together.

        None: it scores in each layer, when that has attended.
        """
        if self.asks_ranks or not (self.joins_layers or self.copies_keys):
            return None
        if not self.needs_queries:
            return 1 if self.copies_keys else 0
        return policy.window if self.joins_layers else None

    def floats_per_key(self, policy: Policy, head_size: int, group: int) -> int:
        """Return the most float32 numbers that `score` has in memory for a key of a KV head.

        The engine reserves them. The default is enough for four further copies of K or V, and for
        twice the logits of the window. `group` are query heads of a KV head.
        """
        rows = policy.window if self.needs_queries else 0
        return 6 * head_size + (2 * group + 1) * rows

    def kernel_bytes(self, policy: Policy, head_size: int, group: int) -> tuple[int, int]:
        """Return bytes that the kernels of `scores` allocate: for each padded score, and each query
        head.

        The engine reserves them beside the scores and as many numbers before pooling. The default
        is that of `window_scores`: two float32 for each query row and 512 keys (C++: 1,024), and
        less for each row and key. `group` are query heads of a KV head.
        """
        if self.copies_keys or not self.needs_queries:
            return 0, 0
        return -(-8 * group * policy.window // 512) + 10 * group, 0

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        """Return the importance of each key of one request in one layer; higher is kept first.

        `[G, T]` float32 without NaN, of G KV heads and T tokens. The scores of the first `sinks`
        and the last `window` tokens are ignored, because those tokens stay. Ties go to the lower
        position.
        """
        raise NotImplementedError

    def score_parts(self, inputs: ScorerInputs) -> torch.Tensor:
        """Return what `score` returns, some KV heads at a time where the request is long."""
        import torch

        if not self.in_parts:
            return self.score(inputs)
        return torch.cat([self.score(part) for part in inputs.parts()])

    def scores(self, batch: EvictionBatch) -> torch.Tensor:
        """Return the scores of all requests that evict in a step: `[S, G, columns]` float32.

        Column i is the token in place i of the request's table; columns without a token, and those
        of the last `window` tokens, may be missing or hold anything. A scorer with a kernel of its
        own overrides this, and keeps `score` as the kernel's reference.
        """
        return batch.score_each(self.kind, self.score_parts)

    def compiled(self, batch: EvictionBatch) -> torch.Tensor:
        """Score a made-up batch, whose cache holds anything, to compile what `scores` launches."""
        import torch

        if type(self).scores is not Scorer.scores:
            return self.scores(batch)
        shape = len(batch.shortened), batch.call.key_cache.shape[1], batch.longest
        return torch.zeros(shape, device=batch.call.query.device)

    def probed(self, inputs: ScorerInputs) -> torch.Tensor | None:
        """Run `score` for the check at start-up; None if the scorer only has a kernel."""
        return None if type(self).score is Scorer.score else self.score(inputs)

    @classmethod
    def check_class(cls) -> None:
        if cls.score is Scorer.score and cls.scores is Scorer.scores and cls.evicts:
            raise ValueError(
                f"the scorer {cls.__module__}:{cls.__qualname__} has no method "
                "`score(self, inputs)`"
            )

    @property
    def unsupported(self) -> Unsupported:
        if not self.evicts:
            return {Feature.KV_TURNS: "it keeps every token, so there is nothing to resume from"}
        if self.needs_positions:
            return {Feature.KV_TURNS: "it needs positions, which survivors do not have"}
        return {}

    def check(self, policy: Policy) -> None:
        if self.needs_queries and policy.window < 1:
            raise ValueError(
                f"policy {policy.name!r} scores with the queries of the observation window, so "
                f"`window` must be at least 1, not {policy.window}"
            )
        if not policy.schedule.every:
            return
        reason = None
        if not self.evicts or (self.needs_queries and policy.window > 1):
            reason = "has no scores during generation"
        elif self.needs_positions:
            reason = "needs positions, which survivors of an eviction do not have"
        if reason is not None:
            raise ValueError(
                f"policy {policy.name!r} has the schedule {policy.schedule.kind!r}, but its scorer "
                f"{self.kind!r} {reason}: choose one that accumulates (accumulated_attention, "
                "persistence), recency, or one that looks at keys and values alone"
            )
