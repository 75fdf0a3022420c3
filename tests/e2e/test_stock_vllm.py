# SPDX-License-Identifier: Apache-2.0
"""Programs that use `vllm.LLM` and never import vllm_pyramid, with and without a policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.support import is_cpu_build, random_prompts
from tests.plumbing.children import Child, greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 64 << 20,
}
LENGTHS = (400, 33, 180)
TOKENS = 16
# Modules that only a process with a policy imports.
INERT = (
    *("compat.input_processor", "compat.stats", "frontend.engine_config", "frontend.metrics"),
    "scheduler.scheduler",
)


@pytest.fixture(scope="module")
def results(random_model, tmp_path_factory) -> Iterator[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("stock")
    prompts = random_prompts(LENGTHS, vocab_size=2048)
    plain = [[prompt, greedy(TOKENS)] for prompt in prompts]
    whole = [[prompt, greedy(TOKENS, kv_policy="full")] for prompt in prompts]
    llm = {"model": str(random_model), **SETTINGS}
    policy = {"kv_policy": "pyramidkv", "kv_budget": "12%", "kv_min_tokens": 0}
    children = {
        "none": Child(
            folder / "none",
            (llm, [plain]),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            PYRAMID_CPU_PLATFORM="1",  # as if an engine with a policy had started the process
            PYRAMID_TEST_SPAWN="1",
        ),
        "pyramidkv": Child(
            folder / "pyramidkv",
            (
                {**llm, "additional_config": policy, "max_num_seqs": len(LENGTHS)},
                [[*whole, *plain]],
            ),
            PYRAMID_TEST_SPAWN="1",
        ),
    }
    try:
        yield {name: child.results()[0] for name, child in children.items()}
    finally:
        for child in children.values():
            child.kill()


def test_without_a_policy(results: dict[str, dict[str, Any]]) -> None:
    """Nothing of ours runs, the platform of a CPU build included."""
    none = results["none"]
    if is_cpu_build():
        assert (none["platform"], none["block_size"]) == ("vllm.platforms.cpu", 128)
    assert none["prefix_caching"] is True  # vLLM's default
    assert none["groups"] == 1
    assert "pyramid" not in none["worker"] and "pyramid" not in none["scheduler"].lower()
    assert not [name for name in none["runner"] if "pyramid" in name.lower()]
    assert not {f"vllm_pyramid.{name}" for name in INERT} & set(none["modules"])
    assert all(output["report"] is None for output in none["outputs"])


def test_without_a_policy_and_full_generate_the_same(results: dict[str, dict[str, Any]]) -> None:
    """The three requests run at once in both engines, as no more are let in."""
    full = results["pyramidkv"]["outputs"][: len(LENGTHS)]
    assert [output["report"]["kv_policy"] for output in full] == ["full"] * len(LENGTHS)
    assert all(output["report"]["evicted_tokens"] == 0 for output in full)
    for output, expected in zip(full, results["none"]["outputs"], strict=True):
        assert output["token_ids"] == expected["token_ids"]


def test_with_a_policy(results: dict[str, dict[str, Any]]) -> None:
    evicting = results["pyramidkv"]
    assert evicting["platform"].startswith("vllm_pyramid.") and evicting["block_size"] == 16
    assert {f"vllm_pyramid.{name}" for name in INERT} - set(evicting["modules"]) == {
        "vllm_pyramid.scheduler.scheduler"  # it is in the engine's own process
    }
    reports = [output["report"] for output in evicting["outputs"][len(LENGTHS) :]]
    assert [report["prompt_tokens"] for report in reports] == list(LENGTHS)
    for report in (reports[0], reports[2]):
        assert report["kv_budget"] == -(-12 * report["prompt_tokens"] // 100)
        assert report["evicted_tokens"] > 0
        assert report["blocks_after"] < report["blocks_before"]
