# SPDX-License-Identifier: Apache-2.0
"""Ridge values: kept values change least so that the window's queries get back their outputs.

With P the attention of a KV head's window queries over the kept tokens, V the values of these and O
the outputs over all that the layer held,

    dV = P^T (P P^T + r m I)^-1 (O - P V),      m: mean of the diagonal of P P^T

minimises |P (V + dV) - O|^2 + r m |dV|^2. Every KV head solves its own.

    vllm serve MODEL --kv-policy auto --kv-policy-args '{"values": "ridge", "ridge": 0.1}'

- **What it gives**: with the evictions of `auto` at weight 1, divergence falls at 6 % on three
  models and at 12 % on two (lab/results/gates.md#e-ridge-values); on the built-in model nothing.
- **What it costs**: at each prompt's end, in each layer, the window's attention to the whole prompt
  once more, and a solve of as many equations as the window has query rows of a KV head, in
  PyTorch. Decode steps and the cache's memory cost nothing.
- **Prefix caching and `kv_turns`** work: V is written in blocks that are the request's own.
- **Refused**: scorers without an observation window, evictions inside the prompt and during
  generation, solved lengths, selected pages, caches of 8 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.values import Values

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.hooks import WorkerContext, WorkerHooks


class RidgeValues(Values):
    """Keep V in the page of its K, and let the kept values make up for the evicted ones.

    Attributes:
        ridge: r, how much a change of the values counts against a change of the outputs. With less
            the window's outputs come back more exactly, and the values change more.
    """

    kind: Literal["ridge"] = "ridge"
    ridge: float = Field(default=1.0, ge=1e-3, le=1e3)

    def check(self, policy: Policy) -> None:
        reason = None
        if not policy.evicts:
            reason = "it evicts nothing, so there is nothing to make up for"
        elif policy.attend.selects or any(part.works_during_prompt for part in policy.parts):
            reason = (
                "values change at prompts' ends alone so far, and all of them are read: "
                f"its schedule is {policy.schedule.kind!r}, its scorer {policy.scorer.kind!r}, its "
                f"attend {policy.attend.kind!r}, and chunk.tokens {policy.chunk.tokens}"
            )
        elif not policy.scorer.needs_queries:
            reason = (
                f"its scorer {policy.scorer.kind!r} has no observation window, whose outputs are "
                "to come back"
            )
        elif policy.allocator.defers:
            reason = (
                f"its allocator {policy.allocator.kind!r} solves the lengths with the last layer, "
                "when the queries of the others are gone"
            )
        if reason is not None:
            raise ValueError(
                f"policy {policy.name!r} cannot change the kept values (values: ridge): {reason}"
            )

    @property
    def unsupported(self) -> Unsupported:
        return {Feature.CACHE_OF_8_BITS: "it would round the changes of the kept values away"}

    def worker_hooks(self, policy: Policy, context: WorkerContext) -> WorkerHooks | None:
        from vllm_pyramid.methods.ridge_values.worker import RidgeHooks

        return RidgeHooks(policy, self.ridge, context)
