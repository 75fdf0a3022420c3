# SPDX-License-Identifier: Apache-2.0
"""Policies that evict during generation hold a bounded cache, and gather at the cost of one pass.

`PYRAMID_GENERATE=10000` generates that many tokens in place of the few of the normal test run.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from tests.engine.support import Engine, Job, greedy, random_prompts
from tests.scheduler.checks import check_pool
from vllm_pyramid.methods.accumulated.kernels import cpu

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

BLOCK = 16
NUM_TOKENS = int(os.environ.get("PYRAMID_GENERATE", "700"))


def test_a_long_generation_holds_a_bounded_cache(tiny, monkeypatch) -> None:
    """Blocks held never exceed budget, interval and what a step rounds up; nothing leaks."""
    gather, calls = cpu.add_key_mass, []

    def watched(*inputs: Any, **options: Any) -> None:
        calls.append(options["log_sum_exp"] is not None)
        gather(*inputs, **options)

    monkeypatch.setattr(cpu, "add_key_mass", watched)
    budget, interval, prompts = 64, 64, (500, 20)
    engine = tiny(
        "llama-thin",
        kv_policy="h2o",
        kv_budget=budget,
        kv_policy_args={"interval": interval},
        dtype="float32",
        max_model_len=NUM_TOKENS + 512,
        hf_overrides={"max_position_embeddings": NUM_TOKENS + 512},
        max_num_seqs=2,
        # What one of them needs without evictions; both would not fit.
        num_gpu_blocks_override=4 * -(-(NUM_TOKENS + 512) // BLOCK) + 1,
    )
    most = np.zeros(4, np.int64)
    decoding = 0

    def look(engine: Engine) -> None:
        nonlocal most, decoding
        running = engine.scheduler.running
        if len(running) == 2 and all(r.num_output_tokens > 2 for r in running):
            most = np.maximum(most, engine.coordinator.counters.held_blocks)
            decoding += 1
        if decoding % 97 == 0:
            check_pool(engine.coordinator)

    evictions = engine.coordinator.counters.num_evictions
    outcomes = engine.run(
        [Job(p, greedy(NUM_TOKENS)) for p in random_prompts(prompts, seed=3)],
        look,
        max_steps=NUM_TOKENS + 1000,
    )
    engine.check_whole()
    assert calls and all(calls)
    # A request: the budget rounded up to a block, what is added until the next eviction, and the
    # block that the step after it may have been given before the head went.
    bound = 2 * (-(-(budget + BLOCK - 1 + interval) // BLOCK) + 1)
    print(f"{decoding} steps, at most {most.tolist()} blocks held in a layer, bound {bound}")
    assert decoding > NUM_TOKENS - 50 and (most <= bound).all()
    assert engine.coordinator.counters.num_evictions - evictions >= 2 * (NUM_TOKENS // interval - 2)
    for outcome, prompt_len in zip(outcomes, prompts, strict=True):
        assert len(outcome.token_ids) == NUM_TOKENS
        total = prompt_len + NUM_TOKENS
        assert outcome.report["evicted_tokens"] >= 4 * (total - budget - 2 * interval)
