# SPDX-License-Identifier: Apache-2.0
"""Selectors: given scores and a number, which tokens stay? Sinks and the window always do."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

from pydantic import Field

from vllm_pyramid.policy.component import Component, parse_component


class Selector(Component):
    """Base of all selectors."""

    section: ClassVar[str] = "selector"

    @property
    def recent_share(self) -> float:
        """The share of a layer's tokens that go to the most recent ones."""
        return 0.0


class TopKSelector(Selector):
    """The best-scored tokens of every KV head, each head its own; ties go to the lower position.

    Attributes:
        recent: the share of a layer's tokens that go to the most recent ones, rounded down and at
            least the policy's `window`; the best of the others get the rest. Only with scorers
            that accumulate.
    """

    kind: Literal["top_k"] = "top_k"
    recent: float = Field(default=0.0, ge=0.0, lt=1.0)

    @property
    def recent_share(self) -> float:
        return self.recent


class TopKSharedSelector(Selector):
    """The best-scored tokens, one set for all heads of a layer; ties go to the lower position."""

    kind: Literal["top_k_shared"] = "top_k_shared"


SELECTORS: dict[str, type[Selector]] = {
    "top_k": TopKSelector,
    "top_k_shared": TopKSharedSelector,
}
parse_selector = partial(parse_component, Selector, SELECTORS)
