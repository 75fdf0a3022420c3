# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid bench` with engines: its rows say what happened."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from vllm_pyramid.bench.plan import Plan
from vllm_pyramid.bench.shapes import named_shape
from vllm_pyramid.cli import main
from vllm_pyramid.policy import load_policy

pytestmark = pytest.mark.engine

PROMPT, OUTPUT, REQUESTS, POOL, LAYERS = 512, 24, 10, 2, 2


def test_throughput(tmp_path: Path) -> None:
    command = ["bench", "throughput", "--layers", str(LAYERS), "--policies", "full,pyramidkv"]
    command += ["--budget", "12%", "--prompt-len", str(PROMPT), "--output-len", str(OUTPUT)]
    command += ["--num-prompts", str(REQUESTS), "--pool-prompts", str(POOL), "--threads", "1"]
    command += ["--repetitions", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    written = json.loads((tmp_path / "throughput.json").read_text())
    assert written["machine"]["bandwidth"] > 1e8 and written["machine"]["flops"] > 1e8
    full, evicted = written["rows"]
    assert (full["policy"], evicted["policy"]) == ("full", "pyramidkv")
    pool = Plan(named_shape("small", LAYERS), PROMPT, OUTPUT, REQUESTS, POOL).blocks(POOL)
    whole, prompt = pool // POOL, PROMPT // 16 * LAYERS
    kept = int(load_policy("pyramidkv", "12%").plan(PROMPT, LAYERS, 16).blocks.sum())
    for row in (full, evicted):
        # The same tokens of each, in the same pool; a token that was not generated is an error.
        assert row["output_tokens_per_s"] > 0 and row["decode_tokens_per_s"] > 0
        assert 0 < row["prefill_share"] < 1 and row["preemptions"] == 0
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"] and row["tpot_p50_ms"] > 0
        assert row["resident_max"] == row["predicted_resident"] or row is evicted
        assert max(row["peak_blocks"], row["decode_blocks"]) <= pool + LAYERS
    # What decodes fills the pool with whole requests, or with many that gave most of theirs back.
    assert full["resident_max"] == POOL and full["decode_blocks"] == POOL * whole
    resident = evicted["resident_max"]
    assert resident > 2 * POOL
    assert evicted["decode_blocks"] <= resident * (kept + (OUTPUT // 16 + 1) * LAYERS)
    # A prompt is held whole until it is processed, by both.
    assert evicted["peak_blocks"] >= prompt + kept
    assert full["output_ratio"] == 1.0 and evicted["decode_batch"] > full["decode_batch"]
    with (tmp_path / "throughput.csv").open() as file:
        assert [row["policy"] for row in csv.DictReader(file)] == ["full", "pyramidkv"]
    assert (tmp_path / "throughput.png").stat().st_size > 1000
