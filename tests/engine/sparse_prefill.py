# SPDX-License-Identifier: Apache-2.0
"""A model, settings and requests of sparse prefill, and what their reports say."""

from __future__ import annotations

from typing import Any

from tests.engine.support import Engine, Job, Outcome, greedy, random_prompts

MODEL, LAYERS, KV_HEADS, TILE = "qwen3", 4, 2, 128
TOP_P, DENSE_LAST = 0.5, 64
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_batched_tokens": 512,
    "max_model_len": 1024,
}
LENGTHS = (5, 192, 191, 700, 321, 900)
TOKENS = 8


def sparse(top_p: float = TOP_P, **changes: Any) -> dict[str, Any]:
    return {
        "kv_policy": "sparse-prefill",
        "kv_policy_args": {"prefill": {"top_p": top_p}},
        **SETTINGS,
        **changes,
    }


def jobs(lengths: tuple[int, ...] = LENGTHS, apart: int = 1, **extra_args: Any) -> list[Job]:
    """Some meet requests that decode, or come in chunks."""
    return [
        Job(prompt, greedy(TOKENS, logprobs=4, **extra_args), arrival=index * apart)
        for index, prompt in enumerate(random_prompts(lengths, seed=8))
    ]


def sparse_tokens(prompt: int) -> int:
    return max(prompt - DENSE_LAST, 0) // TILE * TILE


def visible(prompt: int, cached: int = 0) -> int:
    """Pairs of tiles in all layers and KV heads, by arithmetic."""
    first, last = cached // TILE, sparse_tokens(prompt) // TILE
    return LAYERS * KV_HEADS * sum(range(first + 1, last + 1))


def read(outcome: Outcome) -> int:
    found = outcome.report["prefill_tiles_read"]
    seen = visible(len(outcome.job.prompt), outcome.cached)
    assert outcome.report["prefill_tiles_visible"] == seen
    assert 0 <= found <= seen
    return int(found)


def fresh(engine: Engine) -> Engine:
    assert engine.llm.reset_prefix_cache()
    return engine
