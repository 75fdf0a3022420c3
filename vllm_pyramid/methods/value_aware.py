# SPDX-License-Identifier: Apache-2.0
"""Attention times the size of V (VATP, EMNLP 2024, arXiv:2406.12335)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.step.scorer_inputs import ScorerInputs


class ValueAwareScorer(Scorer):
    """The attention of the window's queries to a key, times the L1 norm of its value.

    Attention alone says little where V is next to nothing. The mean over the window's queries and
    over the query heads of a group; the paper has one query head a KV head. Sinks have much
    attention and hardly any V, so the paper keeps the first 20 tokens whatever their score.
    """

    needs_queries: ClassVar[bool] = True
    attention_mass: ClassVar[bool] = True
    kind: Literal["value_aware"] = "value_aware"

    def score(self, view: ScorerInputs) -> torch.Tensor:
        """See the base."""
        attention = view.reduce_groups(view.attention().mean(dim=1))
        return attention * view.values.norm(p=1, dim=-1)
