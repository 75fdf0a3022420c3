# SPDX-License-Identifier: Apache-2.0
"""What an engine shows a scorer is what the model computed, in float32, whatever the chunks.

Keys, values and queries of every layer come from Transformers. The formulas are tested in
`tests/methods/test_scorers.py`; here the same scorer ranks what Transformers computed, and what the
engine kept must be the best of that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.paper import HuggingFaceModel
from tests.engine.support import Engine, EnginePool, greedy, random_prompts
from tests.methods.views import cos_sin, view_of
from vllm_pyramid.methods.accumulated import AccumulatingScorer
from vllm_pyramid.plan import RetentionPlan
from vllm_pyramid.policy import load_policy
from vllm_pyramid.step.rotary import Rotary

pytestmark = pytest.mark.engine

LENGTHS = [130, 57, 401, 256]
BLOCK = 16
# Scores may differ by this share of the spread of a head's scores: another order of sums.
NEAR_TIE = 5e-4
CASES: dict[str, tuple[str | int, dict[str, Any]]] = {
    "snapkv-expected": ("30%", {"window": 16, "queries": 8}),
    "keydiff": (64, {"schedule": {"kind": "interval", "interval": 8}}),
    "keyformer": (64, {"interval": 16}),
}


class RecordingModel(HuggingFaceModel):
    """Records V too."""

    values: list[torch.Tensor]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self.values = [*(self.values if layer else []), value[0]]
        return super().attend(layer, query, key, value, scale)


@pytest.mark.parametrize("name", list(CASES))
def test_kept_positions_are_the_best(
    name: str, random_model: Path, tmp_path: Path, engines: EnginePool
) -> None:
    budget, args = CASES[name]
    engine = engines.get(
        random_model,
        kv_policy=name,
        kv_budget=budget,
        kv_policy_args=args,
        kv_trace=str(tmp_path),
        dtype="float32",
        max_num_batched_tokens=96,
        max_model_len=1024,
    )
    check_best(engine, tmp_path, RecordingModel(str(random_model)), name)
    engines.close()


def check_best(engine: Engine, folder: Path, model: RecordingModel, name: str) -> None:
    """What an engine that serves the case `name` keeps; `folder` is that of its traces."""
    budget, args = CASES[name]
    prompts = random_prompts(LENGTHS, seed=3, vocab_size=2048)
    outcomes = engine.generate(prompts, greedy(20))
    engine.check_whole()
    policy = load_policy(name, budget, args)
    rotary, checked = Rotary(cos_sin(32, 4096)), 0
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        n = len(prompt)
        plan = policy.plan(n, engine.num_layers, BLOCK)
        assert isinstance(plan, RetentionPlan)
        model.forward(prompt)
        with np.load(folder / f"{outcome.request_id}.npz") as file:
            kept = [torch.from_numpy(file[f"kept_{layer}"]).long() for layer in range(8)]
        for layer in range(engine.num_layers):
            assert kept[layer].shape[1] == plan.end.held[layer]
            gathers = isinstance(policy.scorer, AccumulatingScorer)
            count = n if gathers else max(policy.window, 1)
            view = view_of(
                model.keys[layer],
                model.values[layer],
                model.queries[layer].transpose(0, 1)[-count:],
                rotary,
                window=policy.window,
                sinks=policy.sinks,
                layer=layer,
            )
            if isinstance(policy.scorer, AccumulatingScorer):
                scores = policy.scorer.observe(view)
            else:
                scores = policy.scorer.score(view)
            first, last = int(plan.end.front[layer]), int(plan.end.recent[layer])
            checked += _check_best(scores, kept[layer], first, last)
    assert checked > 500, "hardly anything was evicted"


def _check_best(scores: torch.Tensor, kept: torch.Tensor, first: int, last: int) -> int:
    """Protected tokens are kept, and no other kept one is worse than one that is not; evicted."""
    tokens, evicted = scores.shape[1], 0
    for row, positions in zip(scores, kept, strict=True):
        is_kept = torch.zeros(tokens, dtype=torch.bool)
        is_kept[positions] = True
        if positions.numel() == tokens:
            continue
        inside = torch.zeros(tokens, dtype=torch.bool)
        inside[first : tokens - last] = True
        assert is_kept[~inside].all()
        worst, best = row[is_kept & inside].min(), row[~is_kept].max()
        spread = row[inside].max() - row[inside].min()
        assert worst >= best - NEAR_TIE * spread, (float(worst), float(best))
        evicted += int((~is_kept).sum())
    return evicted
