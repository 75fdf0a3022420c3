# SPDX-License-Identifier: Apache-2.0
"""Prefix caching beside eviction: how much is found, and what is kept to be found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.support import Start, random_prompts

pytestmark = pytest.mark.engine

WINDOW = 8


def _settings(**changes: Any) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "max_model_len": 1024,
        "kv_policy": "snapkv",
        "kv_budget": 64,
        "kv_policy_args": {"window": WINDOW},
        **changes,
    }


def test_samples_of_one_prompt_share_it(tiny: Start) -> None:
    """`n = 3`: in one step and in several; each evicts on its own."""
    from vllm import SamplingParams

    engine = tiny("mistral", **_settings())
    (prompt,) = random_prompts([400], seed=3)
    params = SamplingParams(n=3, seed=7, max_tokens=6, ignore_eos=True, detokenize=False)
    engine.llm.reset_prefix_cache()
    before = engine.coordinator.counters.num_evictions
    (output,) = engine.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert [len(choice.token_ids) for choice in output.outputs] == [6, 6, 6]
    assert engine.coordinator.counters.num_evictions - before == 3
    assert not engine.pool.duplicates and len(engine.pool.bundles) == 25, (
        "each computed it for itself"
    )
    engine.check_whole()
