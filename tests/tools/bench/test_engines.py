# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid bench` with engines: its rows say what happened."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

from tests.engine.support import is_cpu_build
from vllm_pyramid.policy import load_policy
from vllm_pyramid.tools.bench.job import Job, Variant
from vllm_pyramid.tools.bench.shapes import named_shape
from vllm_pyramid.tools.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.usefixtures("prepared_programs")]

PROMPT, OUTPUT, REQUESTS, POOL, LAYERS = 512, 24, 10, 2, 2


def _blocks(output_len: int, requests: int) -> int:
    """Of the block pool for `POOL` whole requests."""
    job = Job(named_shape("small", LAYERS), PROMPT, output_len, requests, POOL)
    return job.pool_blocks(Variant("full", None), POOL)


def test_throughput(tmp_path: Path) -> None:
    command = ["bench", "throughput", "--layers", str(LAYERS), "--policies", "full,pyramidkv"]
    command += ["--budget", "12%", "--prompt-len", str(PROMPT), "--output-len", str(OUTPUT)]
    command += ["--num-prompts", str(REQUESTS), "--pool-prompts", str(POOL), "--threads", "1"]
    command += ["--repetitions", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    written = json.loads((tmp_path / "throughput.json").read_text())
    full, evicted = written["rows"]
    assert (full["policy"], evicted["policy"]) == ("full", "pyramidkv")
    pool = _blocks(OUTPUT, REQUESTS)
    whole, prompt = pool // POOL, PROMPT // 16 * LAYERS
    kept = int(load_policy("pyramidkv", "12%").plan(PROMPT, LAYERS, 16).end.blocks.sum())
    for row in (full, evicted):
        # The same tokens of each, in the same pool; a token that was not generated is an error.
        assert row["output_tokens_per_s"] > 0 and row["decode_tokens_per_s"] > 0
        assert 0 < row["prefill_share"] < 1 and row["preemptions"] == 0
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p90_ms"] and row["tpot_p50_ms"] > 0
        assert row["ttft_p99_ms"] is None  # of ten requests
        assert row["resident_max"] <= REQUESTS
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


def test_conversations_find_what_was_said(tmp_path: Path) -> None:
    """Two turns after a shared beginning, one conversation at a time."""
    command = ["bench", "prefix", "--layers", str(LAYERS), "--policies", "full,snapkv"]
    command += ["--budget", "64", "--prompt-len", "200", "--shared-len", "160", "--turns", "2"]
    command += ["--output-len", "8", "--num-prompts", "3", "--concurrency", "1", "--threads", "1"]
    command += ["--repetitions", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    full, evicted = json.loads((tmp_path / "prefix.json").read_text())["rows"]
    assert full["prompt_len"] == 160 + 2 * 200 + 8 and full["turns"] == 2
    first, last = 360, 568
    # The first conversation computes all of its first turn; then its second turn finds the first
    # one, with `full` its answer too; those that follow find the shared beginning in their first.
    whole = [0, 367 // 16 * 16, 160, 367 // 16 * 16, 160, 367 // 16 * 16]
    assert full["cached_share"] == pytest.approx(sum(whole) / (3 * (first + last)))
    left = first // 16 * 16  # of what was evicted all of the prompt is there, and nothing else
    assert evicted["cached_share"] == pytest.approx(
        sum([0, left, 160, left, 160, left]) / (3 * (first + last))
    )
    for row in (full, evicted):
        assert row["resident_max"] == 1
        # So short a prompt is no measure of the speed: only that both kinds were timed.
        assert row["ttft_hit_ms"] > 0 and row["ttft_miss_ms"] > 0


def test_decode_only(tmp_path: Path) -> None:
    """All hold requests at once and decode in turns; none of ours is preempted meanwhile."""
    command = ["bench", "throughput", "--decode-only", "--layers", str(LAYERS)]
    # Stock vLLM has no attention for the CPU in its CUDA wheel.
    stock = ["stock"] if is_cpu_build() else []
    selecting = tmp_path / "half.yaml"
    attend = {"kind": "pages", "budget": 256, "dense_layers": 1, "scorer": "box"}
    selecting.write_text(
        yaml.safe_dump({"name": "half", "budget": "100%", "scorer": "none", "attend": attend})
    )
    policies = ",".join([*stock, "full", "pyramidkv", str(selecting)])
    command += ["--policies", policies, "--budget", "12%", "--threads", "1"]
    command += ["--prompt-len", str(PROMPT), "--output-len", "96", "--num-prompts", "12"]
    command += ["--pool-prompts", "2", "--repetitions", "2", "--out", str(tmp_path)]
    command += ["--engine-args", '{"kv_admission": "prompt"}']
    assert main(command) == 0
    written = json.loads((tmp_path / "throughput.json").read_text())
    full, evicted, selected = written["rows"][-3:]
    for row in written["rows"][:-3]:
        # Its own blocks of 128 tokens, so at most one more of them for each request than it needs.
        assert (row["policy"], row["decode_batch"]) == ("stock", 2)
        assert row["decode_blocks"] == 2 * 5 * 8 * LAYERS and row["decode_ratio"] == 1.0
    pool = _blocks(96, 12)
    assert full["decode_batch"] == 2
    # More come in than the pool holds at their ends: the windows stay short of that.
    assert evicted["decode_batch"] > 2
    assert evicted["decode_blocks"] <= evicted["peak_blocks"] <= pool
    # One layer of two reads everything, the other 16 of 33 pages and more.
    assert 0.7 < selected["read_share"] < 0.75
    assert full["read_share"] is None and evicted["read_share"] is None
    for row in (full, evicted, selected):
        assert row["repetitions"] == 2 and row["decode_low"] <= row["decode_tokens_per_s"]
        assert row["decode_ratio"] > 0


def test_pages_that_are_all_read_are_no_selection(tmp_path, capsys) -> None:
    selecting = tmp_path / "all.yaml"
    attend = {"kind": "pages", "budget": 4096, "dense_layers": 1, "scorer": "box"}
    selecting.write_text(
        yaml.safe_dump({"name": "all", "budget": "100%", "scorer": "none", "attend": attend})
    )
    command = ["bench", "throughput", "--layers", str(LAYERS), "--policies", f"full,{selecting}"]
    command += ["--prompt-len", "64", "--output-len", "8", "--num-prompts", "1", "--threads", "1"]
    command += ["--repetitions", "1", "--out", str(tmp_path)]
    assert main(command) == 2
    assert "generated tokens read all 70 that they saw" in capsys.readouterr().err


def test_requests_at_once_where_memory_is_shared_out_otherwise(tmp_path: Path) -> None:
    """V of three of four layers in host memory; room for gathered numbers; 8-bit floats."""
    layers, prompt, output = 4, 482, 64  # all are in before the first needs another block
    command = ["bench", "throughput", "--decode-only", "--layers", str(layers)]
    command += ["--policies", "kcache,h2o,full@fp8"]
    command += ["--budget", "64", "--prompt-len", str(prompt), "--output-len", str(output)]
    command += ["--num-prompts", "14", "--pool-prompts", "4", "--threads", "1"]
    command += ["--repetitions", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    kcache, h2o, fp8 = json.loads((tmp_path / "throughput.json").read_text())["rows"]
    pool = 4 * 35 * layers  # blocks: a request of 546 tokens takes 35 of a layer
    # In five of eight halves of the memory of `full`: six requests in the place of four.
    begin, end = 31 + 3 * 16, 35 + 3 * 18
    assert 6 <= kcache["resident_max"] <= (pool + layers) // begin
    assert begin <= kcache["decode_blocks"] / kcache["resident_max"] <= end
    assert fp8["policy"] == "full@fp8" and fp8["budget"] == "100%"
    assert fp8["resident_max"] >= 8  # instead of four
    assert fp8["peak_blocks"] > pool  # of half the size
    # Evicted, each has 5 to 9 blocks of a layer; the last one's prompt has to find room.
    pool = pool * 64 // 65
    assert 1 + (pool - 31 * layers) // (9 * layers) == 12 <= h2o["resident_max"]
    assert 5 <= h2o["decode_blocks"] / (layers * h2o["resident_max"]) <= 9
    assert 31 * layers <= h2o["peak_blocks"] <= pool + layers
