# SPDX-License-Identifier: Apache-2.0
"""Selectors: given scores and a number, which tokens stay? Sinks and the window always do."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.policy.component import Component

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.eviction_batch import EvictionBatch


class Selector(Component):
    """Base of all selectors."""

    section: ClassVar[str] = "selector"

    @property
    def recent_share(self) -> float:
        """The share of a layer's tokens that go to the most recent ones, window included."""
        return 0.0

    def select(self, scores: torch.Tensor, keep: int) -> torch.Tensor:
        """Which tokens of one request stay in one layer.

        Args:
            scores: `[G, T]` float32; sinks and window have +inf. keep: how many stay in each head,
                at least those with +inf and at most T.

        Returns:
            `[G, keep]` integers, the places of those that stay: no place twice, in any order.
        """
        raise NotImplementedError

    def kept(self, scores: torch.Tensor, batch: EvictionBatch) -> torch.Tensor:
        """The same for all requests that evict in a step: `[S, G, max_keep]` int32.

        Args:
            scores: as from `Scorer.scores`.

        Returns:
            As `ops.select`: ascending places in the requests' tables.

        Raises:
            ValueError: `select` returned another shape, or places that do not exist.
        """
        return batch.select_each(self.kind, self.select, scores)

    def probed(self, scores: torch.Tensor, keep: int) -> torch.Tensor | None:
        """What is tried once at start-up: `select`; None where it is a kernel's alone."""
        return None if type(self).select is Selector.select else self.select(scores, keep)

    @classmethod
    def check_class(cls) -> None:
        """A class that selects nothing is a mistake."""
        if cls.select is Selector.select and cls.kept is Selector.kept:
            raise ValueError(
                f"the selector {cls.__module__}:{cls.__qualname__} has no method "
                "`select(self, scores, keep)`"
            )


class TopKSelector(Selector):
    """The best-scored tokens of every KV head, each head its own; ties go to the lower position.

    Attributes:
        recent: the share of a layer's tokens that go to the most recent ones, rounded down and at
            least the policy's `window`; the best of the others get the rest. For scorers that
            accumulate: others say with `window` what is recent.
    """

    kind: Literal["top_k"] = "top_k"
    recent: float = Field(default=0.0, ge=0.0, lt=1.0)

    @property
    def recent_share(self) -> float:
        """See the base."""
        return self.recent

    def check(self, policy: Policy) -> None:
        """See the base."""
        if self.recent and (policy.scorer.needs_queries or not policy.scorer.evicts):
            raise ValueError(
                f"policy {policy.name!r} sets selector.recent, which its scorer "
                f"{policy.scorer.kind!r} does not use: set `window` instead"
            )

    def select(self, scores: torch.Tensor, keep: int) -> torch.Tensor:
        """The rule in PyTorch; `kept` runs the kernel."""
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :keep]

    def kept(self, scores: torch.Tensor, batch: EvictionBatch) -> torch.Tensor:
        """See the base: `ops.select`, which protects sinks and window by itself."""
        window, sinks = batch.policy.window, batch.policy.sinks
        if not batch.protects_more_than(window, sinks):
            return batch.call.ops.select(
                scores, batch.lens, batch.keeps, window=window, sinks=sinks, max_keep=batch.max_keep
            )
        return batch.call.ops.select(
            batch.protect(scores), batch.lens, batch.keeps, window=0, max_keep=batch.max_keep
        )
