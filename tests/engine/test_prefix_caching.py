# SPDX-License-Identifier: Apache-2.0
"""Prefix caching beside eviction: tokens as without it, exact hits, nothing shared is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conversations import Rows, cached_tokens, conversation, run_waves, traces
from tests.engine.support import (
    EnginePool,
    Job,
    Outcome,
    assert_same_tokens,
    count_preemptions,
    greedy,
    is_compiled,
    random_prompts,
)
from tests.scheduler.checks import check_pool

pytestmark = pytest.mark.engine

BLOCK = 16
WINDOW = 8
POLICIES: dict[str, dict[str, Any]] = {
    "pyramidkv": {"kv_policy": "pyramidkv", "kv_budget": "25%"},
    "snapkv": {"kv_policy": "snapkv", "kv_budget": 64, "kv_policy_args": {"window": WINDOW}},
    "auto": {"kv_policy": "auto", "kv_budget": "25%"},
    "ridge": {"kv_policy": "auto", "kv_budget": "25%", "kv_policy_args": {"values": "ridge"}},
    "streaming-llm": {"kv_policy": "streaming-llm", "kv_budget": 64},
    "xkv": {"kv_policy": "xkv", "kv_budget": "25%"},
    "full": {"kv_policy": "full"},
    "kcache": {"kv_policy": "kcache", "kv_policy_args": {"top_n": 32}},
    "select": {
        "kv_policy": "select",
        "kv_policy_args": {"attend": {"budget": 96, "dense_layers": 1, "recent": 16}},
    },
}


def _settings(policy: str, **changes: Any) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "max_num_batched_tokens": 200,
        "max_num_seqs": 8,
        "max_model_len": 1024,
        **POLICIES[policy],
        **changes,
    }


KEEP_ALL = ("full", "kcache", "select")
# torch.compile takes long, so there are fewer of these.
COMPILED = ("pyramidkv", "xkv", "kcache", "select")


@pytest.mark.parametrize(
    ("policy", "compiled"),
    [
        *((policy, False) for policy in POLICIES),
        *(pytest.param(policy, True, marks=pytest.mark.slow) for policy in COMPILED),
    ],
)
def test_tokens_and_what_is_kept_are_those_without_it(
    engines: EnginePool,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    policy: str,
    compiled: bool,
) -> None:
    answered: dict[bool, list[Outcome]] = {}
    results = {}
    for caching in (True, False):
        folder = tmp_path / str(caching)
        settings = _settings(policy, enable_prefix_caching=caching, enforce_eager=not compiled)
        if policy not in KEEP_ALL:
            settings["kv_trace"] = str(folder)
        engine = engines.get(tiny_model("mistral"), **settings)
        assert is_compiled(engine) == compiled
        engine.shuffle_blocks()
        waves = conversation()
        if policy in KEEP_ALL:  # budgets are refused
            waves[1].pop()
        look = Rows(engine) if caching else None
        outcomes = [o for o in run_waves(engine, waves, look) if o.output is not None]
        for outcome in outcomes:  # V of a hit is not written again, nor read by other chunks
            outcome.report.pop("v_bytes_written", None)
            outcome.report.pop("v_bytes_read", None)
        answered[caching] = outcomes
        results[caching] = (
            [outcome.report for outcome in outcomes],
            traces(folder, outcomes),
            cached_tokens(outcomes),
        )
        if look is not None:
            assert look.most > 20
    assert_same_tokens(answered[True], answered[False])
    with_it, without = results[True], results[False]
    assert with_it[0] == without[0]
    assert with_it[1] == without[1] and (any(with_it[1]) or policy in KEEP_ALL)
    assert not any(without[2])
    assert sum(cached > 0 for cached in with_it[2]) >= 6, with_it[2]


def test_hits_are_as_long_as_they_can_be(
    engines: EnginePool, tiny_model: Callable[[str], Path]
) -> None:
    """All that was computed, but for the queries that score: shared or copied."""
    settings = _settings("snapkv", max_num_batched_tokens=512)
    engine = engines.get(tiny_model("mistral"), **settings)
    prompt, other, more = random_prompts([500, 500, 300], seed=1)
    look = Rows(engine)

    def cached(tokens: list[int], **extra: Any) -> int:
        (outcome,) = engine.run([Job(tokens, greedy(4, **extra))], look)
        return int(outcome.output.num_cached_tokens)

    def all_but_window(tokens: int) -> int:
        return (tokens - WINDOW) // BLOCK * BLOCK

    assert cached(prompt) == 0
    assert cached(prompt) == all_but_window(500) == 480
    for own in ({"kv_budget": 200}, {"kv_budget": 25}, {"kv_budget": "90%"}):
        assert cached(prompt, **own) == 480
    assert cached(prompt, kv_policy="full") == 496
    assert cached(prompt[:300]) == all_but_window(300)
    assert cached(prompt[:64]) == 63 // BLOCK * BLOCK, "nothing is evicted from it"
    assert cached([*prompt, *more]) == 496
    assert cached([*prompt, *more]) == all_but_window(800)
    assert cached([*prompt[:400], *other]) == 400
    assert cached(other) == 0, "it never began with these tokens"
    assert engine.llm.reset_prefix_cache()
    assert cached(prompt) == 0
    engine.check_whole()


def test_blocks_that_are_needed_are_not_kept(
    engines: EnginePool, tiny_model: Callable[[str], Path]
) -> None:
    """In a pool without room for copies a prompt leaves its head behind, or nothing."""
    engine = engines.get(
        tiny_model("mistral"),
        **_settings("snapkv", max_num_batched_tokens=512, max_model_len=512),
        num_gpu_blocks_override=4 * 32 + 1,  # one prompt of the greatest length, and the null block
    )
    look = Rows(engine)
    (prompt,) = random_prompts([500], seed=1)
    found = []
    for _ in range(3):
        (outcome,) = engine.run([Job(prompt, greedy(12))], look)
        found.append((outcome.output.num_cached_tokens, outcome.token_ids))
    left = (500 - 64) // BLOCK * BLOCK  # before the least skip, of all layers alike
    assert [cached for cached, _ in found] == [0, left, left]
    assert found[0][1] == found[1][1] == found[2][1]
    engine.check_whole()


def test_salts_do_not_see_each_other(
    engines: EnginePool, tiny_model: Callable[[str], Path]
) -> None:
    engine = engines.get(tiny_model("mistral"), **_settings("snapkv", max_num_batched_tokens=512))
    engine.llm.reset_prefix_cache()
    (prompt,) = random_prompts([400], seed=2)
    found = []
    for salt in (None, "a", "b", "a", None):
        request = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
        (output,) = engine.llm.generate([request], greedy(4), use_tqdm=False)
        found.append(output.num_cached_tokens)
    assert found == [0, 0, 0, 384, 384]


def test_samples_of_one_prompt_share_it(
    engines: EnginePool, tiny_model: Callable[[str], Path]
) -> None:
    """`n = 3`: in one step and in several; each evicts on its own."""
    from vllm import SamplingParams

    engine = engines.get(tiny_model("mistral"), **_settings("snapkv", max_num_batched_tokens=512))
    (prompt,) = random_prompts([400], seed=3)
    params = SamplingParams(n=3, seed=7, max_tokens=6, ignore_eos=True, detokenize=False)
    engine.llm.reset_prefix_cache()
    before = engine.coordinator.counters.num_evictions
    (output,) = engine.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert [len(choice.token_ids) for choice in output.outputs] == [6, 6, 6]
    assert engine.coordinator.counters.num_evictions - before == 3
    assert not engine.pool.twins and len(engine.pool.bundles) == 25, "each computed it for itself"
    engine.check_whole()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preemption(
    engines: EnginePool, tiny_model: Callable[[str], Path], asynchronous: bool
) -> None:
    """A pool too small for all: who comes back finds its prompt; tokens are those of a large one.

    `--kv-admission prompt`, so that requests really are preempted.
    """
    system, *tails = random_prompts([160, *range(60, 160, 10)], seed=4)
    params = greedy(90, logprobs=2)
    jobs = [Job([*system, *tail], params, arrival=2 * i) for i, tail in enumerate(tails)]
    found = {}
    for blocks in (2000, 230):
        engine = engines.get(
            tiny_model("mistral"),
            **_settings("snapkv", max_model_len=512),
            kv_admission="prompt",
            async_scheduling=asynchronous,
            num_gpu_blocks_override=blocks,
        )
        look = None if asynchronous else Rows(engine)
        with count_preemptions(engine) as count:
            outcomes = run_waves(engine, [jobs], look)
        found[blocks] = outcomes
        assert bool(count["evicted"]) == (blocks == 230), count
    assert_same_tokens(found[230], found[2000])


def test_nothing_is_lost_over_many_requests(
    engines: EnginePool, tiny_model: Callable[[str], Path]
) -> None:
    """The cache is too small for what comes by; every block is somebody's or free to the end.

    `PYRAMID_SOAK=3000` sends that many requests in place of the few of the normal test run.
    """
    engine = engines.get(tiny_model("mistral"), **_settings("snapkv"), num_gpu_blocks_override=400)
    trunks = random_prompts([240] * 6, seed=5)
    count = int(os.environ.get("PYRAMID_SOAK", "200"))
    tails = random_prompts([20 + i % 90 for i in range(count)], seed=6)
    hits = 0
    for start in range(0, len(tails), 20):
        jobs = [
            Job([*trunks[i % 6][: 60 * (i % 5)], *tail], greedy(1 + i % 7), arrival=i)
            for i, tail in enumerate(tails[start : start + 20])
        ]
        hits += sum(cached > 0 for cached in cached_tokens(engine.run(jobs)))
        check_pool(engine.coordinator)
        assert engine.pool.get_num_free_blocks() == engine.usable_blocks
    assert hits > count // 4
    engine.check_whole()
