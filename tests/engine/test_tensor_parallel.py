# SPDX-License-Identifier: Apache-2.0
"""Two ranks with half of the KV heads each keep and generate what one rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.children import Child, greedy
from tests.engine.support import EnginePool, Job, random_prompts
from tests.engine.support import greedy as greedy_params

pytestmark = pytest.mark.engine

KV_HEADS = 4
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "kv_cache_memory_bytes": 32 << 20,
}
LENGTHS = (300, 40, 181, 212)
ARRIVALS = (0, 0, 2, 2)
TOKENS = 16


def _traces(folder: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """The trace files by prompt length and rank (empty for a single one)."""
    traces = {}
    for path in folder.glob("*.npz"):
        name, dash, rank = path.stem.partition("-rank")
        with np.load(path) as arrays:
            assert str(arrays["request_id"]) == name
            traces[int(arrays["prompt_len"]), dash + rank] = dict(arrays)
    return traces


POLICIES: dict[str, dict[str, Any]] = {
    "pyramidkv": {"kv_budget": 64},
    "xkv": {"kv_budget": 64},
    "kcache": {"kv_policy_args": {"top_n": 16}},
    "pyramidinfer": {
        "kv_policy_args": {
            "piece_tokens": 100,
            "interval": 1,
            "decay_ratio": 0.5,
            "min_context": 16,
        }
    },
}


@pytest.mark.parametrize("policy", POLICIES)
def test_two_ranks(engines: EnginePool, tiny_model: Any, tmp_path: Path, policy: str) -> None:
    settings = {"kv_policy": policy, **POLICIES[policy]}
    model = tiny_model("llama-mha")
    prompts = random_prompts(LENGTHS)
    waves: list[list[Any]] = [[], []]
    for prompt, arrival in zip(prompts, ARRIVALS, strict=True):
        waves[arrival // 2].append([prompt, greedy(TOKENS)])
    llm = {
        "model": str(model),
        **SETTINGS,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "additional_config": {**settings, "kv_trace": str(tmp_path / "two")},
    }
    child = Child(tmp_path / "child", llm, waves, VLLM_CPU_OMP_THREADS_BIND="nobind")
    try:
        engine = engines.get(model, **SETTINGS, **settings, kv_trace=str(tmp_path / "one"))
        jobs = [
            Job(prompt, greedy_params(TOKENS), arrival)
            for prompt, arrival in zip(prompts, ARRIVALS, strict=True)
        ]
        outcomes = engine.run(jobs)
        result = child.result()
    finally:
        child.kill()

    for output, outcome in zip(result["outputs"], outcomes, strict=True):
        assert output["token_ids"] == outcome.token_ids
        # Every chunk of a prompt reads V of those before it, and the chunks need not be the same.
        reports = [{**report} for report in (output["report"], outcome.report)]
        for report in reports:
            report.pop("v_bytes_read", None)
        assert reports[0] == reports[1]

    one, two = _traces(tmp_path / "one"), _traces(tmp_path / "two")
    assert sorted(one) == sorted((length, "") for length in LENGTHS)
    assert sorted(two) == sorted((n, f"-rank{rank}") for n in LENGTHS for rank in (0, 1))
    for length in LENGTHS:
        whole, ranks = one[length, ""], [two[length, f"-rank{rank}"] for rank in (0, 1)]
        for rank in ranks:
            assert (rank["held"] == whole["held"]).all()
        for layer, held in enumerate(whole["held"]):
            heads = [rank[f"kept_{layer}"] for rank in ranks]
            assert [part.shape for part in heads] == [(KV_HEADS // 2, held)] * 2
            assert (np.concatenate(heads) == whole[f"kept_{layer}"]).all(), (length, layer)
