# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid calibrate` with its engine, and the policy that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.engine.support import greedy, random_prompts

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.usefixtures("prepared_programs")]

BUDGET = 40
ENGINE = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}


def test_calibrated_shares_are_the_mean_of_the_solved_ones(engines, tiny_model, tmp_path) -> None:
    model = tiny_model("llama-mha")
    prompts = random_prompts([300, 120, 500, 20], seed=9)
    file, output = tmp_path / "prompts.jsonl", tmp_path / "budgets.yaml"
    file.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in prompts))
    engine_args = {**ENGINE, "enforce_eager": True, "skip_tokenizer_init": True}
    command = [sys.executable, "-m", "vllm_pyramid.tools.cli", "calibrate", "--model", str(model)]
    command += ["--prompts", str(file), "--kv-budget", str(BUDGET), "-o", str(output)]
    command += ["--engine-args", json.dumps(engine_args)]
    engines.close()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "4 layers over 3 prompts (1 fitted into the budget)" in done.stdout

    solving = engines.get(model, kv_policy="xkv", kv_budget=BUDGET, **ENGINE)
    runs = solving.generate(prompts, greedy(4))
    chosen = np.array([run.report["solved_tokens"] for run in runs[:3]], float) - 8
    shares = (chosen / chosen.sum(axis=1, keepdims=True)).mean(axis=0)

    calibrated = engines.get(model, kv_policy=str(output), **ENGINE)
    for run in calibrated.generate(prompts[:3], greedy(4)):
        assert run.report["kv_policy"] == "budgets" and "solved_tokens" not in run.report
        n = len(run.job.prompt)
        keep = 8 + 4 * (BUDGET - 8) * shares
        for held, wanted in zip(run.report["kept_tokens"], keep, strict=True):
            possible = {n - (n - k) // 16 * 16 for k in (int(wanted), int(wanted) + 1)}
            assert held in possible, (held, wanted)
    calibrated.check_whole()
