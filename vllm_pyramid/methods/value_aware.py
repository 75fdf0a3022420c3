# SPDX-License-Identifier: Apache-2.0
"""Attention times the size of V (VATP, EMNLP 2024, arXiv:2406.12335)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.step.scorer_inputs import ScorerInputs


class ValueAwareScorer(Scorer):
    """VATP: keep the tokens with much attention and large values.

    Scores a token by the attention of the window's queries, averaged over these and over the query
    heads of a group, times the L1 norm of its value: attention says little where V is next to
    nothing (arXiv:2406.12335). The paper has one query head a KV head. Sinks have much attention
    and hardly any V, so the paper keeps the first 20 tokens whatever their score. It has no
    parameters.
    """

    needs_queries: ClassVar[bool] = True
    attention_mass: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True
    kind: Literal["value_aware"] = "value_aware"

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        attention = inputs.reduce_groups(inputs.attention().mean(dim=1))
        return attention * inputs.values.norm(p=1, dim=-1)
