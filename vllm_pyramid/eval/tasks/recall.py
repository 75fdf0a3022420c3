# SPDX-License-Identifier: Apache-2.0
"""How much of the attention the kept tokens hold."""

from __future__ import annotations

import numpy as np

from vllm_pyramid.eval.task import Result, Sample
from vllm_pyramid.eval.tasks.retrieval import MultiKey


class AttentionRecall(MultiKey):
    """The share of the window's attention to the text that falls on tokens that are kept.

    PyramidKV's Figure 8 and XKV's retention R, measured in the engine at the moment of eviction:
    the mean over layers and KV heads. The observation window is in neither sum. Prompts as in
    `multi-key`.
    """

    name = "attention-recall"
    title = "attention recall"
    summary = "the share of the attention that the kept tokens hold"
    metric = "share of attention"
    needs_recall = True

    def score(self, sample: Sample, result: Result) -> float:
        assert result.recall is not None
        return float(np.mean([np.mean(heads) for heads in result.recall]))

    def digits(self, sample: Sample, result: Result) -> float | None:
        return None
