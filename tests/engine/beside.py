# SPDX-License-Identifier: Apache-2.0
"""What tests of eviction beside other features of vLLM share: settings, and `paper.py`'s word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.engine.oracles import check_log_probabilities
from tests.engine.paper import HuggingFaceModel, keep_best, window_importance
from tests.engine.support import Outcome, kept_at_evictions

BLOCK, WINDOW, BUDGET = 16, 8, 48
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 100,
    "kv_policy": "snapkv",
    "kv_budget": BUDGET,
    "kv_policy_args": {"window": WINDOW},
}
WHOLE = {"kv_policy": "full"}


def check_kept(model: HuggingFaceModel, outcome: Outcome, traces: Path) -> list[torch.Tensor]:
    """What each layer kept, `[G, held]`, after a look at whether it is the paper's choice."""
    prompt = outcome.job.prompt
    n = len(prompt)
    model.forward(prompt)
    kept = kept_at_evictions(traces, outcome)[n]
    different = total = 0
    for layer, positions in enumerate(kept):
        scores = window_importance(model.queries[layer], model.keys[layer], WINDOW, 5, "mean")
        best = keep_best(scores, positions.shape[1], WINDOW)
        for head, row in enumerate(positions.tolist()):
            different += len(set(row) - best[head])
            total += len(row)
    assert total and different <= 0.005 * total, f"{different} of {total}: more than near ties"
    return kept


def check_decoding(model: HuggingFaceModel, outcome: Outcome, traces: Path) -> None:
    """Kept positions by the paper's score, and tokens by attention with the rest hidden."""
    prompt, kept = outcome.job.prompt, None
    if outcome.report["evicted_tokens"]:
        kept = check_kept(model, outcome, traces)
    rows = model.forward([*prompt, *outcome.token_ids[:-1]], len(prompt), kept)
    check_log_probabilities(rows[len(prompt) - 1 :], outcome, 1e-3)
