# SPDX-License-Identifier: Apache-2.0
"""Two ranks under vLLM's second runner, whose attention reads shifted tables, as on two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import models
from tests.engine.support import EnginePool, Job
from tests.engine.support import greedy as greedy_params
from tests.engine.test_runner_v2 import (
    BESIDE,
    DEEPER,
    POLICIES,
    REQUESTS,
    SETTINGS,
    SHAPE,
    prompts,
    variables,
)
from tests.plumbing.children import Child, greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
SERVED = ("pyramidkv", "thinned")


def test_two_ranks(tmp_path: Path, engines: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One KV head each; rows leave between their layers at the same places."""
    model = {}
    for name, shape in zip(SERVED, (SHAPE, DEEPER), strict=True):
        monkeypatch.setitem(models.SHAPES, name, shape)
        model[name] = models.write_model(name, tmp_path / name)
    waves: list[list[object]] = [[], [], []]
    for prompt, (_, tokens, arrival, own) in zip(prompts(), REQUESTS, strict=True):
        waves[arrival // 2].append([prompt, greedy(tokens, **own)])
    settings = {name: SETTINGS | BESIDE.get(name, {}) for name in SERVED}
    child = Child(
        tmp_path / "child",
        *(
            (
                {
                    "model": str(model[name]),
                    **settings[name],
                    **TWO_RANKS,
                    "additional_config": POLICIES[name],
                },
                waves,
            )
            for name in SERVED
        ),
        triton="attention",
        **variables("2"),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    try:
        expected = {}
        for name in SERVED:
            jobs = [
                Job(prompt, greedy_params(tokens, **own), arrival)
                for prompt, (_, tokens, arrival, own) in zip(prompts(), REQUESTS, strict=True)
            ]
            engine = engines.get(model[name], **(settings[name] | POLICIES[name]))
            expected[name] = [(one.token_ids, one.report) for one in engine.run(jobs)]
        results = child.results(500)
    finally:
        child.kill()
    for name, result in zip(SERVED, results, strict=True):
        for rank in result["ranks"]:
            assert "vllm_pyramid.worker.adapter_v2.AdapterV2" in rank["runner"]
            assert rank["one_tensor_of_tables"]
        assert len(result["ranks"]) == 2
        outputs = [(output["token_ids"], output["report"]) for output in result["outputs"]]
        assert outputs == expected[name]
        assert [report["evicted_tokens"] > 0 for _, report in outputs] == [True, False, False, True]
