# SPDX-License-Identifier: Apache-2.0
"""The worst step of an engine takes no more memory for its evictions than the engine reserves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.support import EnginePool, Job, greedy, random_prompts
from tests.plumbing.peak_memory import Peak, peak_memory
from vllm_pyramid.attention import layer_context
from vllm_pyramid.step import eviction_memory

pytestmark = pytest.mark.engine

LONGEST, SHORT, REQUESTS, HEADS = 4080, 96, 320, 4


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["snapkv-expected", "snapkv"])
def test_one_longest_prompt_with_the_most_short_ones(
    engines: EnginePool,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    engine = engines.get(
        tiny_model("llama-mha"),
        kv_policy=policy,
        kv_budget=64,
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=4096 + REQUESTS * (SHORT + 8),
        kv_cache_memory_bytes=256 << 20,
    )
    worker = engine.core.model_executor.driver_worker.worker
    memory = worker.adapter.pyramid.memory
    evict_layer, found = layer_context.evict_layer, []

    def measured(policy: Any, inputs: Any, evictions: Any, *rest: Any) -> None:
        with peak_memory() as peak:
            evict_layer(policy, inputs, evictions, *rest)
        found.append((len(evictions.request_ids), peak))

    monkeypatch.setattr(layer_context, "evict_layer", measured)

    def worst() -> tuple[list[list[int]], Peak]:
        found.clear()
        lens = [SHORT] * (REQUESTS - 1)
        lens.insert(100, LONGEST)
        outcomes = engine.run([Job(prompt, greedy(2)) for prompt in random_prompts(lens)])
        together = [peak for count, peak in found if count == REQUESTS]
        assert len(together) == engine.num_layers, "the prompts did not end in one step"
        kept = [max(outcome.report["kept_tokens"]) for outcome in outcomes]
        assert all(keep < n for keep, n in zip(kept, lens, strict=True)), "a prompt kept everything"
        return [outcome.token_ids for outcome in outcomes], max(
            together, key=lambda peak: peak.bytes
        )

    answers, tensors = [], []
    # As served, the least that holds the longest request, and without pieces.
    for bound in (eviction_memory.SCORES_BYTES, 4 * HEADS * LONGEST, 1 << 40):
        monkeypatch.setattr(eviction_memory, "SCORES_BYTES", bound)
        tokens, peak = worst()
        reserved = memory.eviction_bytes()
        print(f"{policy}, {bound}: reserved {reserved}, taken {peak.tensors} + {peak.scratch}")
        assert peak.bytes <= reserved
        answers.append(tokens)
        tensors.append(peak.tensors)
    padded = 4 * HEADS * LONGEST * REQUESTS
    assert padded > 16 << 20, "one piece would do"
    assert tensors[1] < padded / 2 and tensors[1] < tensors[0] < tensors[2] and tensors[2] > padded
    assert answers[0] == answers[1] == answers[2], "pieces have changed the answers"
    engine.check_whole()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["snapkv-expected", "snapkv"])
def test_levels_fit_into_what_is_reserved(
    engines: EnginePool, tiny_model: Callable[[str], Path], policy: str
) -> None:
    """What a prompt's end takes under pressure, where nothing is evicted."""
    engine = engines.get(
        tiny_model("llama-mha"),
        kv_policy=policy,
        kv_budget=64,
        kv_evict="pressure",
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=4096 + REQUESTS * (SHORT + 8),
        kv_cache_memory_bytes=256 << 20,
    )
    pyramid = engine.core.model_executor.driver_worker.worker.adapter.pyramid
    after_eviction, found = pyramid.late.after_eviction, []

    def measured(inputs: Any, evictions: Any) -> None:
        with peak_memory() as peak:
            after_eviction(inputs, evictions)
        found.append(peak.bytes)

    pyramid.late.after_eviction = measured
    try:
        lens = [LONGEST, *[SHORT] * (REQUESTS - 1)]
        outcomes = engine.run([Job(prompt, greedy(2)) for prompt in random_prompts(lens)])
    finally:
        del pyramid.late.after_eviction
    levels = (
        sum(lens) * 4 * 2
    )  # of a layer's KV heads; those of all layers are in the cache's share
    print(f"{policy}: reserved {pyramid.memory.eviction_bytes()}, taken {max(found)}")
    assert len(found) >= engine.num_layers
    assert max(found) <= pyramid.memory.eviction_bytes() + levels
    assert all(outcome.report["evicted_to"] == [] for outcome in outcomes)
    engine.check_whole()
