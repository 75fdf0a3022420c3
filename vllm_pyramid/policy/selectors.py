# SPDX-License-Identifier: Apache-2.0
"""Selectors choose which tokens stay, given scores and a number; sinks and window always do."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.policy.component import Component

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.eviction_batch import EvictionBatch


class Selector(Component):
    """Base class of selectors."""

    section: ClassVar[str] = "selector"

    @property
    def recent_share(self) -> float:
        """The share of a layer's tokens that go to the most recent ones, window included."""
        return 0.0

    def select(self, scores: torch.Tensor, keep: int) -> torch.Tensor:
        """Choose the tokens of one request that stay in one layer: `[G, keep]` places, in any
        order.

        `scores` are `[G, T]` float32; sinks and window have +inf, and `keep` is at least their
        number.
        """
        raise NotImplementedError

    def kept(self, scores: torch.Tensor, batch: EvictionBatch) -> torch.Tensor:
        """Choose for all requests that evict in a step: `[S, G, max_keep]`, as `ops.select`."""
        return batch.select_each(self.kind, self.select, scores)

    def probed(self, scores: torch.Tensor, keep: int) -> torch.Tensor | None:
        """Run `select` for the check at start-up; None if the selector only has a kernel."""
        return None if type(self).select is Selector.select else self.select(scores, keep)

    @classmethod
    def check_class(cls) -> None:
        if cls.select is Selector.select and cls.kept is Selector.kept:
            raise ValueError(
                f"the selector {cls.__module__}:{cls.__qualname__} has no method "
                "`select(self, scores, keep)`"
            )


class TopKSelector(Selector):
    """Keep the best-scored tokens of each KV head; ties go to the lower position.

    Attributes:
        recent: the share of a layer's tokens that go to the most recent ones, rounded down and at
            least the policy's `window`; the best of the others get the rest. Only for scorers that
            accumulate; other policies set `window`.
    """

    kind: Literal["top_k"] = "top_k"
    recent: float = Field(default=0.0, ge=0.0, lt=1.0)

    @property
    def recent_share(self) -> float:
        return self.recent

    def check(self, policy: Policy) -> None:
        if self.recent and (policy.scorer.needs_queries or not policy.scorer.evicts):
            raise ValueError(
                f"policy {policy.name!r} sets selector.recent, which its scorer "
                f"{policy.scorer.kind!r} does not use: set `window` instead"
            )

    def select(self, scores: torch.Tensor, keep: int) -> torch.Tensor:
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :keep]

    def kept(self, scores: torch.Tensor, batch: EvictionBatch) -> torch.Tensor:
        """Choose with `ops.select`, which protects sinks and window by itself."""
        window, sinks = batch.policy.window, batch.policy.sinks
        if not batch.protects_more_than(window, sinks):
            return batch.call.ops.select(
                scores, batch.lens, batch.keeps, window=window, sinks=sinks, max_keep=batch.max_keep
            )
        return batch.call.ops.select(
            batch.protect(scores), batch.lens, batch.keeps, window=0, max_keep=batch.max_keep
        )
