# SPDX-License-Identifier: Apache-2.0
"""Policies that evict during generation: what they keep, step by step, and that memory is bounded.

`PYRAMID_GENERATE=10000` generates that many tokens in place of the few of the normal test run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.heavy_hitters import (
    Method,
    WalkedModel,
    check_log_probabilities,
    held_tokens,
)
from tests.engine.support import (
    Engine,
    EnginePool,
    Job,
    greedy,
    kept_at_evictions,
    random_prompts,
)
from tests.scheduler.checks import check_pool
from vllm_pyramid.kernels.cpu import functions as cpu

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

BLOCK = 16
NUM_TOKENS = int(os.environ.get("PYRAMID_GENERATE", "700"))


@pytest.mark.parametrize(
    ("policy", "args", "method", "generate"),
    [
        ("h2o", {"interval": 32}, Method(40, 32, 20), 110),
        # The paper's own: one token in, one out.
        ("h2o", {"interval": 1, "fill_blocks": False}, Method(40, 1, 20), 24),
        (
            "scissorhands",
            {"interval": 48, "queries": 30, "window": 4},
            Method(40, 48, 4, history=30),
            120,
        ),
    ],
)
def test_kept_tokens_step_by_step(
    engines: EnginePool,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    policy: str,
    args: dict[str, Any],
    method: Method,
    generate: int,
) -> None:
    """Two query heads a KV head, chunks of 50 tokens, blocks in random order, mixed batches."""
    path = tiny_model("mistral")
    engine = engines.get(
        path,
        kv_policy=policy,
        kv_budget=method.budget,
        kv_policy_args=args,
        kv_trace=str(tmp_path),
        dtype="float32",
        max_num_batched_tokens=50,
        max_num_seqs=8,
        max_model_len=512,
    )
    engine.shuffle_blocks()
    jobs = [
        Job(prompt, greedy(generate, logprobs=1), arrival=arrival)
        for prompt, arrival in zip(random_prompts([130, 30, 57], seed=11), [0, 1, 9], strict=True)
    ]
    outcomes = engine.run(jobs)
    engine.check_whole()
    fill_blocks = args.get("fill_blocks", True)
    model = WalkedModel(str(path), method)
    for outcome in outcomes:
        prompt = outcome.job.prompt
        computed = len(prompt) + generate - 1  # the last token is sampled and not computed
        kept = kept_at_evictions(tmp_path, outcome)
        assert list(kept) == list(range(len(prompt), computed + 1, method.interval))
        for point, layers in kept.items():
            held = held_tokens(method, point, BLOCK, fill_blocks)
            assert all(rows.shape == (2, held) for rows in layers)
        logprobs = model.walk(
            prompt + outcome.token_ids[:-1], list(kept), [kept[point] for point in kept]
        )
        check_log_probabilities(logprobs[len(prompt) - 1 :], outcome)
        last = max(point for point in kept if point > method.budget)
        assert outcome.report["kept_tokens"] == [len(rows[0]) for rows in kept[last]]
        assert outcome.report["evicted_tokens"] == 4 * (last - len(kept[last][0][0]))
    found = model.found
    print(f"{found.evictions} evictions, {found.different} of {found.kept} kept tokens differ")
    assert not found.problems, found.problems[:5]
    assert found.evictions >= 4 * 3 * 3 and found.different <= 0.005 * found.kept


def test_a_long_generation_holds_a_bounded_cache(
    engines: EnginePool, tiny_model: Callable[[str], Path]
) -> None:
    """Blocks held never exceed budget, interval and what a step rounds up; nothing leaks."""
    budget, interval, prompts = 64, 64, (500, 20)
    engine = engines.get(
        tiny_model("llama-thin"),
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


@pytest.mark.parametrize(
    ("policy", "args"),
    [
        ("h2o", {"interval": 32}),
        ("scissorhands", {"interval": 48, "queries": 30, "window": 4}),
    ],
)
def test_batch_and_chunks_do_not_matter(
    engines: EnginePool,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    args: dict[str, Any],
) -> None:
    """The same request alone, in a crowd, and among arrivals that cut its prompt elsewhere.

    And what is gathered costs one pass over K, since attention leaves the log-sum-exp.
    """
    gather, calls = cpu.add_key_mass, []

    def watched(*inputs: Any, **options: Any) -> None:
        calls.append(options["log_sum_exp"])
        gather(*inputs, **options)

    monkeypatch.setattr(cpu, "add_key_mass", watched)
    engine = engines.get(
        tiny_model("llama-mha"),
        kv_policy=policy,
        kv_budget=40,
        kv_policy_args=args,
        dtype="float32",
        max_num_batched_tokens=64,
        max_num_seqs=16,
        max_model_len=512,
    )
    prompts = random_prompts([150, 90, 33, 200, 61, 20], seed=21)
    alone = [engine.generate([prompt], greedy(90))[0].token_ids for prompt in prompts]
    together = [run.token_ids for run in engine.generate(prompts, greedy(90))]
    staggered = engine.run(
        Job(prompt, greedy(90), arrival=5 * i) for i, prompt in enumerate(reversed(prompts))
    )
    assert together == alone
    assert [run.token_ids for run in reversed(staggered)] == alone
    assert calls and all(lse is not None for lse in calls)
    assert all(run.report["evicted_tokens"] > 0 for run in staggered)
    # The cache is really another one than that of the full policy.
    full = [run.token_ids for run in engine.generate(prompts, greedy(90, kv_policy="full"))]
    assert full != alone and [row[0] for row in full] == [row[0] for row in alone]
    engine.check_whole()
