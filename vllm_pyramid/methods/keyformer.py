# SPDX-License-Identifier: Apache-2.0
"""Accumulated attention with Gumbel noise (Keyformer, MLSys 2024, arXiv:2403.09054).

It evicts every 64 tokens, and the noise is a function of head, query and key, so that runs can be
repeated. In each step the attention is computed once more with noise, in PyTorch: it is for
comparisons, not for speed. All else is as with `h2o`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.methods.accumulated import AccumulatingScorer
from vllm_pyramid.methods.random_scores import uniform

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.scorer_inputs import ScorerInputs

# Of the logits and the noise, `[H, queries, T]`; each takes 40 bytes, most of them for int64.
_NUMBERS_AT_ONCE = 2**23


class KeyformerScorer(AccumulatingScorer):
    """Keyformer: keep the keys with the most attention so far, regularised by Gumbel noise.

    Scores a key by `softmax((logits + noise) / tau)`, summed over all queries so far and the query
    heads of a group (arXiv:2403.09054). The noise, Gumbel(0, 1), is another number for each head,
    query and key; it makes up for the evicted keys, over which the softmax would have spread. tau
    rises linearly from `tau_start`, while the prompt is read, to `tau_end`.

    Attributes:
        tau_start, tau_end: temperature of the softmax at the prompt, and at the end.
        generated: number of generated tokens after which tau is `tau_end`.
        seed: of the noise.
    """

    in_parts: ClassVar[bool] = True
    workspace_bytes: ClassVar[int] = 40 * _NUMBERS_AT_ONCE
    kind: Literal["keyformer"] = "keyformer"
    tau_start: float = Field(default=1.0, gt=0)
    tau_end: float = Field(default=2.0, gt=0)
    generated: int = Field(default=512, ge=1)
    seed: int = 0

    def floats_per_key(self, policy: Policy, head_size: int, group: int) -> int:
        return 3 * head_size + 10 * group + 16  # of one query; see `_NUMBERS_AT_ONCE`

    def observe(self, inputs: ScorerInputs) -> torch.Tensor:
        import torch

        heads = torch.arange(inputs.num_query_heads, device=inputs.queries.device)
        heads = heads + inputs.first_kv_head * inputs.group + inputs.layer * 2**16
        behind = (inputs.query_positions - inputs.prompt_len + 1).clamp(0, self.generated)
        taus = self.tau_start + (self.tau_end - self.tau_start) * behind / self.generated
        total = torch.zeros(inputs.num_query_heads, inputs.num_tokens, device=inputs.queries.device)
        at_once = _NUMBERS_AT_ONCE // (inputs.num_query_heads * inputs.num_tokens)
        for queries in inputs.slices(max(at_once, 1)):
            positions, tau = inputs.query_positions[queries, None], taus[queries, None]
            noise = uniform(self.seed, heads[:, None, None], positions, inputs.places)
            logits = inputs.logits_of(queries) - (-noise.log()).log()
            logits = logits / tau
            sums = logits.logsumexp(dim=-1)
            if inputs.logit_sinks is not None:  # no token's, so without noise
                sums = sums.logaddexp(inputs.logit_sinks.float()[:, None] / tau[:, 0])
            total += (logits - sums[..., None]).exp().sum(dim=1)
        return inputs.reduce_groups(total, "sum")
