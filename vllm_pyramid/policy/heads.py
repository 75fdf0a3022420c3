# SPDX-License-Identifier: Apache-2.0
"""The part of a policy that says whether the KV heads of a layer have lengths of their own.

A part that splits layers gives each KV head a *lane*: a block table and a length. Plans, skips and
counters of blocks then have a number for each lane, `layer * G + head`, in place of one for each
layer. A page of a lane holds G times as many tokens as one of a layer, of one head instead of G:
pages have the same bytes, and come from the same pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.component import Component

if TYPE_CHECKING:
    from vllm_pyramid.plan import Budget, Plan
    from vllm_pyramid.policy.policy import Policy


class Heads(Component):
    """Base class of the section `heads`.

    Class attributes:
        splits: whether each KV head has a block table and a length of its own.
        has_budget: whether the policy's budget says how much is kept.
        defers: whether lengths are decided from the prompt's scores at its end (`DeferredPlan`).
    """

    section: ClassVar[str] = "heads"
    splits: ClassVar[bool] = False
    has_budget: ClassVar[bool] = True
    defers: ClassVar[bool] = False

    @property
    def unsupported(self) -> Unsupported:
        if not self.splits:
            return {}
        return {
            Feature.HOST_CACHE: "a slot has a block of each layer, not of each KV head",
            Feature.KV_KEEP: "what its KV heads keep does not grow with the spans",
        }

    @property
    def works_with_orders(self) -> bool:
        return not self.splits and super().works_with_orders

    def lanes(self, num_kv_heads: int) -> int:
        """Return the lanes of a layer with `num_kv_heads` KV heads."""
        return num_kv_heads if self.splits else 1

    def check_shape(self, num_layers: int, num_kv_heads: int, num_heads: int | None = None) -> None:
        """Raise ValueError if this part is made for another shape; `num_heads` None: any."""

    def on_ranks(self, policy: Policy, ranks: int, num_kv_heads: int) -> Heads:
        """Return this part for tensor-parallel ranks, which share the block tables of their heads.

        Called in the front end. `ranks` have KV heads of their own; those with copies of the same
        heads count once. ValueError: nothing would be evicted although the policy asks for it.
        """
        return self

    def keeps_everything(self, num_lanes: int) -> npt.NDArray[np.bool_]:
        """Return which lanes no prompt ever evicts from, `[num_lanes]` (`RetentionPlan.whole`)."""
        return np.zeros(num_lanes, bool)

    def plan(
        self, policy: Policy, prompt_len: int, num_lanes: int, block_size: int, budget: Budget
    ) -> Plan | None:
        """Return what each lane keeps of a prompt; None: the policy's allocator says it.

        `block_size` is of a lane; `budget` has its floor.
        """
        return None


class AlikeHeads(Heads):
    """Give all KV heads of a layer one block table and one length."""

    kind: Literal["alike"] = "alike"
