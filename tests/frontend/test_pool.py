# SPDX-License-Identifier: Apache-2.0
"""The pool of blocks as the front end works it out, to refuse requests that cannot fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig
from vllm import SamplingParams

from vllm_pyramid.frontend.requests import pool_of
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.fit import Pool, check_fit
from vllm_pyramid.policy.request import check_request


def config(stages: int = 1) -> Any:
    """A model of 5 layers with 4 KV heads."""
    model = SimpleNamespace(
        hf_text_config=LlamaConfig(num_hidden_layers=5),
        max_model_len=1000,
        get_total_num_hidden_layers=lambda: 5,
        get_num_kv_heads=lambda parallel: 4,
    )
    parallel = SimpleNamespace(
        pipeline_parallel_size=stages,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        local_engines_only=False,
    )
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=64, num_gpu_blocks=101),
        model_config=model,
        parallel_config=parallel,
        speculative_config=None,
    )


@pytest.mark.parametrize(("policy", "lanes"), [("snapkv-chunked", 1), ("duoattention", 4)])
@pytest.mark.parametrize(("stages", "layers"), [(1, (5,)), (2, (3, 2))])
def test_heads_with_tables_of_their_own_are_layers(policy, lanes, stages, layers) -> None:
    of_stages = tuple(count * lanes for count in layers)
    pool = pool_of(config(stages), load_policy(policy).heads)
    assert pool == Pool(5 * lanes, 64, 100, 1000, stages=of_stages)


def test_a_request_that_keeps_everything_may_not_fit_into_a_pool_of_streaming_heads() -> None:
    args = {"heads.sinks": 16, "heads.recent": 40, "chunk.tokens": 128}
    policy = load_policy("duoattention", None, args)
    pool = pool_of(config(), policy.heads)
    assert pool is not None
    pool = pool._replace(blocks=130)
    # Half of the heads hold 10 blocks, the others 3 at most.
    params = SamplingParams(max_tokens=1)
    check_fit(check_request(policy, params), 600, params, pool)
    params = SamplingParams(max_tokens=1, extra_args={"kv_policy": "full"})
    with pytest.raises(ValueError, match="holds up to 200 blocks, and the pool has 130: send"):
        check_fit(check_request(policy, params), 600, params, pool)
