# SPDX-License-Identifier: Apache-2.0
"""Selectors: given scores and a number, which tokens stay? Sinks and the window always do."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

from vllm_pyramid.policy.component import Component, parse_component


class Selector(Component):
    """Base of all selectors."""

    section: ClassVar[str] = "selector"


class TopKSelector(Selector):
    """The best-scored tokens of every KV head, each head its own; ties go to the lower position."""

    kind: Literal["top_k"] = "top_k"


SELECTORS: dict[str, type[Selector]] = {"top_k": TopKSelector}
parse_selector = partial(parse_component, Selector, SELECTORS)
