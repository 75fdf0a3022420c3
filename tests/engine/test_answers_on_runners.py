# SPDX-License-Identifier: Apache-2.0
"""Answers evicted under pressure as CUDA users get it: both runners, back ends, and graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine import models
from tests.engine.support import EnginePool, random_prompts
from tests.engine.support import greedy as greedy_params
from tests.engine.test_runner_v2 import SETTINGS, SHAPE, variables
from tests.plumbing.children import Child, greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]

TOKENS, EVERY = 26, 8
# A pool for two thirds of the requests.
POOL = {**SETTINGS, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 23}
POLICY = {
    "kv_policy": "snapkv",
    "kv_budget": 24,
    "kv_evict": "pressure",
    "kv_admission": "prompt",
    "kv_policy_args": {"window": 4, "schedule": {"kind": "pressure", "answers": EVERY}},
}
# vLLM's runner, what `triton` and `graphs` of `child.py` are.
ENGINES = {
    "first": ("1", "attention", None),
    "decode-graphs": ("2", "attention", "FULL_DECODE_ONLY"),
    "full-graphs": ("2", "flash", "FULL_AND_PIECEWISE"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_orders_are_those_of_the_first_runner_on_the_cpu(
    engines: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The same tokens, and the same orders at the same points, of which some are in answers."""
    monkeypatch.setitem(models.SHAPES, "llama-tiny", SHAPE)
    model = models.write_model("llama-tiny", tmp_path / "model")
    prompts, (runner, triton, graphs) = random_prompts([70, 40, 60]), ENGINES[name]
    settings: dict[str, Any] = {**POOL, "async_scheduling": False}
    child = Child(
        tmp_path / name,
        (
            {"model": str(model), **settings, "additional_config": POLICY},
            [[[prompt, greedy(TOKENS)] for prompt in prompts], [], []],
        ),
        triton=triton,
        graphs=graphs,
        kernels=True,
        **variables(runner, graphs is not None),
    )
    try:
        engine = engines.get(model, **settings, **POLICY)
        expected = engine.generate(prompts, greedy_params(TOKENS))
        result = child.results()[0]
    finally:
        child.kill()
    assert f"adapter_v{runner}.AdapterV{runner}" in " ".join(result["runner"])
    found = [(output["token_ids"], output["report"]) for output in result["outputs"]]
    assert found == [(one.token_ids, one.report) for one in expected]
    reports = [report for _, report in found]
    assert all(report["evicted_after"] for report in reports)
    points = [report.get("computed_tokens", 0) for report in reports]
    assert any(points) and all(
        not point or (point > len(prompt) and (point - len(prompt)) % EVERY == 0)
        for point, prompt in zip(points, prompts, strict=True)
    )
    if graphs:
        assert result["counts"]["full replays"] > 1
