# SPDX-License-Identifier: Apache-2.0
"""Blocks really come back, and as many more requests fit."""

from __future__ import annotations

import statistics
from typing import Any

from tests.engine.support import Engine, Job, Start, greedy, random_prompts

PROMPT_LEN, MAX_TOKENS = 2048, 96


def running_in_steady_state(engine: Engine, num_requests: int) -> float:
    """Median number of requests that decode at once while more wait, from the second wave on."""
    counts: list[int] = []

    def count(engine: Engine) -> None:
        finished = num_requests - engine.client.get_num_unfinished_requests()
        if engine.scheduler.waiting and finished >= 8:
            counts.append(
                sum(r.num_computed_tokens >= r.num_prompt_tokens for r in engine.scheduler.running)
            )

    jobs = [
        Job(prompt, greedy(MAX_TOKENS)) for prompt in random_prompts([PROMPT_LEN] * num_requests)
    ]
    engine.run(jobs, count)
    engine.check_whole()
    assert len(counts) > 20
    return statistics.median(counts)


def test_five_times_as_many_requests_run_at_once(tiny: Start) -> None:
    """In a pool of eight full prompts, `pyramidkv` at 12 % decodes five times as many as `full`."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": PROMPT_LEN + 128,
        "max_num_seqs": 128,
        "max_num_batched_tokens": PROMPT_LEN + 128,
        "num_gpu_blocks_override": 8 * PROMPT_LEN // 16 * 4 + 1,
    }
    full = running_in_steady_state(tiny("llama-thin", kv_policy="full", **settings), 32)
    settings |= {"kv_policy": "pyramidkv", "kv_budget": "12%"}
    evicting = running_in_steady_state(tiny("llama-thin", **settings), 160)
    print(f"requests decoding at once, median: full {full}, pyramidkv {evicting}")
    assert evicting >= 5 * full
    assert full >= 5  # `full` filled the pool too: the comparison is fair
